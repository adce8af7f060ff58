"""The model's own rotation at any positions, and back; what is no rotation is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.rope_utils import initialize_rope

from kvkeep.attention import Rotary
from oracles import rotated

D = 32
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
    "yarn 2": {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    "longrope": {
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 12,
        "long_factor": [1.0 + 0.25 * i for i in range(12)],
    },
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
    "default": {},
}


class _Refused(Exception):
    pass


def refuse(reason: str) -> NoReturn:
    raise _Refused(reason)


def module_of(kind: str, dims: int = 24, traditional: bool = False, base: float = 10_000) -> Any:
    scaling = {"rope_type": kind.split()[0], **SCALINGS[kind]}
    return initialize_rope(dims, base, traditional, scaling, max_position_embeddings=512)


def rows_of(heads: int, count: int, seed: int = 0) -> mx.array:
    rows = np.random.default_rng(seed).normal(size=(heads, count, D))
    return mx.array(rows.astype(np.float32))


EVERY = pytest.mark.parametrize("kind", SCALINGS)
LAYOUTS = pytest.mark.parametrize("traditional", [False, True])


@EVERY
@LAYOUTS
@pytest.mark.parametrize("dims", [24, D])
@pytest.mark.parametrize("base", [100, 10_000, 5e6])
def test_back_is_the_inverse(kind: str, traditional: bool, dims: int, base: float) -> None:
    if kind == "longrope" and dims == D:
        dims = 24  # its factors above are for that many
    rotary = Rotary(module := module_of(kind, dims, traditional, base), refuse)
    rows = rows_of(3, 40)
    for first in (0, 1, 5000):
        turned = module(rows[None], offset=first)[0]
        positions = np.arange(first, first + 40)
        np.testing.assert_array_equal(np.asarray(rotary.rotate(rows, positions)), turned)
        back = np.asarray(rotary.unrotate(turned, positions))
        np.testing.assert_allclose(back, np.asarray(rows), rtol=0, atol=1e-5)


@EVERY
@LAYOUTS
@given(seed=st.integers(0, 99), by_head=st.booleans(), count=st.integers(1, 20))
@settings(max_examples=10)
def test_positions_may_be_sparse_and_differ_by_head(
    kind: str, traditional: bool, seed: int, by_head: bool, count: int
) -> None:
    rotary = Rotary(module := module_of(kind, 24, traditional), refuse)
    random = np.random.default_rng(seed)
    positions = np.stack(
        [np.sort(random.choice(9000, count, replace=False)) for _ in range(3 if by_head else 1)]
    )
    rows = rows_of(3, count, seed)
    turned = np.asarray(rotary.rotate(rows, positions))
    for head in range(3):
        for at, position in enumerate(positions[head if by_head else 0].tolist()):
            one = module(rows[None, head : head + 1, at : at + 1], offset=position)
            np.testing.assert_allclose(turned[head, at], np.asarray(one)[0, 0, 0], atol=1e-6)
    back = np.asarray(rotary.unrotate(mx.array(turned), positions))
    np.testing.assert_allclose(back, np.asarray(rows), rtol=0, atol=1e-5)


def test_it_equals_rotary_halves_in_numpy() -> None:
    rows = rows_of(2, 50)
    right = rotated(np.asarray(rows, np.float64), 10_000)
    rotary = Rotary(nn.RoPE(D), refuse)
    np.testing.assert_allclose(np.asarray(rotary.rotate(rows, np.arange(50))), right, atol=1e-5)
    turned = mx.array(right.astype(np.float32))
    back = np.asarray(rotary.unrotate(turned, np.arange(50)[None]))
    np.testing.assert_allclose(back, np.asarray(rows), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_is_turned_in_float32(dtype: mx.Dtype) -> None:
    rotary, rows = Rotary(nn.RoPE(D), refuse), rows_of(2, 30).astype(dtype)
    for function in (rotary.rotate, rotary.unrotate):
        turned = function(rows, np.arange(30))
        assert turned.dtype == mx.float32
        whole = function(rows.astype(mx.float32), np.arange(30))
        np.testing.assert_array_equal(np.asarray(turned), np.asarray(whole))


def shifted(x: mx.array, offset: Any) -> mx.array:
    return nn.RoPE(D)(x, offset=offset + 1)


def mixed(x: mx.array, offset: Any) -> mx.array:
    return x + (nn.RoPE(D)(x, offset=offset) - x)[..., ::-1]


def stretched(x: mx.array, offset: Any) -> mx.array:
    return nn.RoPE(D)(x, offset=offset) * (1 + 0.01 * mx.array(offset).reshape(-1, 1, 1, 1))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (shifted, "turns position 0"),
        (mixed, "does not turn pairs|cannot be turned back"),
        (stretched, "cannot be turned back"),
        (lambda x, offset: -x, "turns position 0"),
        (lambda x: x, "fails"),
    ],
)
def test_what_is_no_rotation_is_refused(module: Callable[..., Any], reason: str) -> None:
    with pytest.raises(_Refused, match=reason):
        Rotary(module, refuse).rotate(rows_of(1, 3), np.arange(3))


def test_a_rotation_that_changes_with_the_length_is_refused_at_once() -> None:
    with pytest.raises(_Refused):
        Rotary(initialize_rope(D, 100, False, {"type": "dynamic", "factor": 2.0}, 64), refuse)
