"""Ragged and union stores own their attention: their rows, their masks."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvkeep import HeadPartitionedKVCache
from kvkeep.attention import install
from kvkeep.caches import (
    RowsForAttentionOnly,
    row_groups,
)
from kvkeep.errors import (
    KvkeepError,
    UnsupportedModelError,
)
from oracles import attend, masked_attention
from uneven import (
    DIM,
    HEADS,
    N_HEADS,
    OFFSET,
    STORES,
    UNION,
    exact,
    exact_rows,
    fed,
    made,
    mx_attention,
    uneven,
)

# -- attention ------------------------------------------------------------------------


def expected_attention(cache: Any, queries: mx.array, scale: float, sinks: Any) -> np.ndarray:
    """Each head alone over its live rows, in float64."""
    n, out = queries.shape[2], []
    share = queries.shape[1] // N_HEADS
    for group in row_groups(cache):
        rows = group.keys.shape[1]
        causal = np.arange(rows)[None] <= np.arange(rows - n, rows)[:, None]
        for i, head in enumerate(group.heads.tolist()):
            mine = slice(head * share, (head + 1) * share)
            own = None if sinks is None else sinks[mine]
            args = (queries[0, mine], group.keys[i : i + 1], group.values[i : i + 1], causal)
            out.append((head, masked_attention(*args, scale, own)))
    return np.concatenate([rows for _, rows in sorted(out, key=lambda pair: pair[0])])


@STORES
@pytest.mark.parametrize("share", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("trimmed", [0, 30, 97])
def test_one_attention_call(store: str, share: int, n: int, with_sinks: bool, trimmed: int) -> None:
    cache, scale = uneven(store), DIM**-0.5
    fed(cache, 2, N_HEADS)
    cache.trim(trimmed)
    queries = exact_rows(N_HEADS * share, n, seed=3)
    sinks = exact_rows(1, N_HEADS * share, seed=4)[0, 0, :, 0] if with_sinks else None
    new = exact_rows(N_HEADS, n, seed=5), exact_rows(N_HEADS, n, seed=6)
    out = attend(cache, queries, *new, scale=scale, sinks=sinks)
    np.testing.assert_allclose(out[0], expected_attention(cache, queries, scale, sinks), atol=1e-5)


@STORES
def test_the_mask_that_a_model_passes_does_not_matter(store: str) -> None:
    install()
    queries, scale = exact_rows(N_HEADS, 1, seed=3), 1.0
    new = exact_rows(N_HEADS, 1, seed=5), exact_rows(N_HEADS, 1, seed=6)
    expected = attend(uneven(store), queries, *new, scale=scale)
    call = mlx_base().scaled_dot_product_attention
    for mask in (None, "causal", mx.ones((1, 77), mx.bool_)):
        cache = uneven(store)
        rows = cache.update_and_fetch(*new)
        out = call(queries, *rows, cache=cache, scale=scale, mask=mask)
        np.testing.assert_array_equal(np.asarray(out), expected)


@STORES
def test_a_mask_that_says_more_than_causal_is_refused(store: str) -> None:
    install()
    cache = uneven(store)
    rows = fed(cache, 1, N_HEADS)
    with pytest.raises(UnsupportedModelError):
        mlx_base().scaled_dot_product_attention(
            exact_rows(N_HEADS, 1), *rows, cache=cache, scale=1.0, mask=mx.zeros((1, 6))
        )


def mlx_base() -> Any:
    from mlx_lm.models import base

    return base


def test_a_unions_mask_does_not_reach_layers_of_another_kind() -> None:
    """A model hands its first layer's mask to all; an exact layer may be as long as the union."""
    install()
    union = made("union", [range(20), [0, 19]], 20)
    mask = union.make_mask(1)
    stock = exact(2, 20)
    queries, new = exact_rows(2, 1, seed=3), exact_rows(2, 1, seed=4)
    rows = stock.update_and_fetch(new, new)
    call = mlx_base().scaled_dot_product_attention
    out = call(queries, *rows, cache=stock, scale=1.0, mask=mask)
    plain = mx.fast.scaled_dot_product_attention(queries, *rows, scale=1.0)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(plain))


def test_only_what_it_handed_out_is_attended_to() -> None:
    cache, other = uneven("ragged"), uneven("ragged")
    old = fed(cache, 1, N_HEADS)
    new, foreign = fed(cache, 1, N_HEADS), fed(other, 1, N_HEADS)
    plain = exact_rows(N_HEADS, 8)
    queries = exact_rows(N_HEADS, 1)
    for keys, values in (old, foreign, (plain, plain), (new[0], plain)):
        with pytest.raises(UnsupportedModelError) as raised:
            cache.attend(mx_attention, queries, keys, values, scale=1.0, sinks=None)
        assert "expected" in str(raised.value)
    cache.attend(mx_attention, queries, *new, scale=1.0, sinks=None)


def test_anything_else_that_a_model_does_with_ragged_rows_fails() -> None:
    install()
    keys: Any = fed(uneven("ragged"), 1, N_HEADS)[0]
    kind: Any = type(keys)
    assert kind is RowsForAttentionOnly
    one = mx.ones((1,))
    acts: list[Any] = [
        lambda: keys.shape,
        lambda: keys[..., :1, :],
        lambda: keys.transpose(0, 1, 3, 2),
        lambda: keys * 2,
        lambda: 2 * keys,
        lambda: list(keys),
        lambda: len(keys),
        lambda: keys == one,
        lambda: setattr(keys, "x", 1),
        lambda: mlx_base().scaled_dot_product_attention(
            exact_rows(4, 1), keys, keys, cache=None, scale=1.0, mask=None
        ),
    ]
    for act in acts:
        with pytest.raises(UnsupportedModelError) as raised:
            act()
        assert "RaggedKVCache" in str(raised.value)
    for act in (  # MLX's own functions name what they were given
        lambda: mx.array(keys),
        lambda: mx.matmul(one, keys),
        lambda: mx.fast.scaled_dot_product_attention(exact_rows(4, 1), keys, keys, scale=1.0),
    ):
        with pytest.raises(
            (TypeError, ValueError, KvkeepError), match=r"RowsForAttentionOnly|RaggedKVCache"
        ):
            act()


# -- masks of the union ---------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("query_heads", [None, 4, 8])
def test_mask_of_a_union(n: int, query_heads: int | None) -> None:
    cache = uneven("union")
    fed(cache, 2, N_HEADS)
    mask = cache.make_mask(n, query_heads=query_heads)
    rows = len(UNION) + 2 + n
    assert (mask.dtype, mask.shape) == (mx.bool_, (1, query_heads or N_HEADS, n, rows))
    share = (query_heads or N_HEADS) // N_HEADS
    for head in range(query_heads or N_HEADS):
        for row in range(n):
            seen = [p in HEADS[head // share] for p in UNION]
            tail = [i <= 2 + row for i in range(2 + n)]
            assert mask[0, head, row].tolist() == seen + tail
    assert cache.make_mask(1, return_array=True).shape[1] == N_HEADS


def test_the_kept_part_of_the_mask_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    build = HeadPartitionedKVCache._built

    def counted(self: Any, query_heads: int, rows: int) -> mx.array:
        built.append(rows)
        return build(self, query_heads, rows)

    monkeypatch.setattr(HeadPartitionedKVCache, "_built", counted)
    cache = made("union", HEADS, OFFSET)
    queries = exact_rows(8, 1)
    for i in range(600):
        rows = fed(cache, 1, N_HEADS, seed=i % 7)
        out = cache.attend(mx_attention, queries, *rows, scale=1.0, sinks=None)
        if i in (0, 255, 256, 257, 599):
            expected = expected_attention(cache, queries, 1.0, None)
            np.testing.assert_allclose(np.asarray(out)[0], expected, atol=1e-5)
    assert len(built) == 1
    cache.trim(10)
    assert len(built) == 1
    cache.trim(cache.offset - 60)
    fed(cache, 1, N_HEADS)
    cache.attend(mx_attention, queries, *cache.keys_and_values(), scale=1.0, sinks=None)
    assert len(built) == 2
