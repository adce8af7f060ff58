"""A model's own rotary embedding, at any positions, and turned back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np

# Where a rotation is tried out. The largest lets slow channels turn far enough to be seen.
_TRIED = np.array([0, 1, 3, 64, 1021, 65_537])
_EXACT = 1e-3  # how far a row turned forth and back may be off: float16 tables still pass


class Rotary:
    """Rotates rows by a model's `rope` module, and back.

    The module turns pairs of channels by angles that are proportional to the position, and
    may multiply them by a constant c. With S flipping the sign of one channel of each pair,
    S rope(S x) turns the other way. Which channels make a pair, and c, is read off the module
    at a few positions, so any layout and any frequencies will do.

    Args:
        module: callable as `module(x, offset=...)`, x [B, H, n, D], as mlx-lm's models do.
        refuse: raises with a reason where it is no such rotation.
    """

    def __init__(self, module: Callable[..., Any], refuse: Callable[[str], NoReturn]) -> None:
        self._module, self._refuse = module, refuse
        self._layouts: dict[int, tuple[mx.array, mx.array]] = {}
        dims = getattr(module, "dims", getattr(module, "dim", None))
        if isinstance(dims, int):
            self._layout(dims)  # refuses at once

    @property
    def idle(self) -> bool:
        """Whether the module gives back the very rows that it gets: a layer without positions."""
        rows = mx.ones((1, 1, 2, 64))
        try:
            return self._module(rows, offset=7) is rows
        except (TypeError, ValueError, RuntimeError):
            return False  # it looks at the channels, so it does something to them

    def rotate(self, rows: mx.array, positions: np.ndarray) -> mx.array:
        """See `kvkeep.spec.Rope`.

        Raises:
            UnsupportedModelError: the module is no such rotation.
        """
        self._layout(rows.shape[-1])
        return self._turned(rows.astype(mx.float32), positions)

    def unrotate(self, rows: mx.array, positions: np.ndarray) -> mx.array:
        """See `kvkeep.spec.Rope`.

        Raises:
            UnsupportedModelError: the module is no such rotation.
        """
        signs, back = self._layout(rows.shape[-1])
        return self._turned(rows.astype(mx.float32) * signs, positions) * back

    def _turned(self, rows: mx.array, positions: np.ndarray) -> mx.array:
        heads, count, dim = rows.shape
        positions = np.atleast_2d(positions)
        if len(positions) == 1 and (np.diff(positions[0]) == 1).all():
            return self._module(rows[None], offset=int(positions[0, 0]))[0]
        # Each row its own batch entry: mlx takes one offset for each.
        offsets = mx.array(np.broadcast_to(positions, (heads, count)).reshape(-1).astype(np.int32))
        turned = self._module(rows.reshape(-1, 1, 1, dim), offset=offsets)
        return turned.reshape(heads, count, dim)

    def _layout(self, dim: int) -> tuple[mx.array, mx.array]:
        """Signs S [D], and S / c^2, what comes after turning S x."""
        if dim not in self._layouts:
            try:
                self._layouts[dim] = self._read_off(dim)
            except (TypeError, ValueError, RuntimeError) as error:
                self._refuse(f"its rotation of {dim} channels fails: {error}")
        return self._layouts[dim]

    def _read_off(self, dim: int) -> tuple[mx.array, mx.array]:
        axes = mx.broadcast_to(mx.eye(dim)[:, None], (dim, len(_TRIED), dim))
        images = np.asarray(self._turned(axes, _TRIED), np.float64)  # [axis, position, channel]
        factor = np.diagonal(images[:, 0])
        if (np.abs(images[:, 0] - np.diag(factor)) > 1e-6).any() or (factor <= 0).any():
            self._refuse("its rotation turns position 0")
        pairs = (np.abs(images) > 1e-7).any(axis=1)
        if (pairs.sum(axis=1) > 2).any() or (pairs != pairs.T).any():
            self._refuse("its rotation does not turn pairs of channels")
        signs = np.where(np.tril(pairs, -1).any(axis=1), -1.0, 1.0)
        back = signs / factor**2
        forth = mx.array((images * signs).astype(np.float32))
        again = np.asarray(self._turned(forth, _TRIED), np.float64) * back
        single = [self._turned(axes[:, :1], _TRIED[at : at + 1]) for at in range(len(_TRIED))]
        apart = np.abs(np.concatenate(single, axis=1) - images).max()
        if max(np.abs(again - np.asarray(axes)).max(), apart) > _EXACT:
            self._refuse("its rotation cannot be turned back by flipping signs")
        return mx.array(signs.astype(np.float32)), mx.array(back.astype(np.float32))
