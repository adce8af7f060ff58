"""What the attention seam asks of a kvkeep cache, and how a cache asks for the seam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx

AttentionFunction = Callable[..., mx.array]
_seam_installers: list[Callable[[], object]] = []


@runtime_checkable
class OwnsAttention(Protocol):
    """A cache that computes its own attention when `owns_attention` is true."""

    @property
    def owns_attention(self) -> bool:
        """Whether the mask that a model built would be wrong for this cache."""
        ...

    def attend(
        self,
        attention: AttentionFunction,
        queries: mx.array,
        keys: Any,
        values: Any,
        *,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention of `queries` [B, H_q, n, D] over this cache's rows: [B, H_q, n, D_v].

        `attention` is mlx-lm's own function, to be called with this cache's mask.
        """
        ...


def on_seam_needed(install: Callable[[], object]) -> None:
    """Register what installs the attention seam (rooms import downward, so it comes to us)."""
    _seam_installers.append(install)


def request_seam() -> None:
    """Make sure the seam is in place: this cache's rows need their own mask."""
    for install in _seam_installers:
        install()
