"""Window attention in pieces: right against float64, and bounded in memory."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import kvkeep.policies.criticalkv as criticalkv_module
import kvkeep.policies.grouping as grouping_module
import kvkeep.policies.lagkv as lagkv_module
import kvkeep.policies.pieces as pieces_module
import kvkeep.policies.window as window_module
from kvkeep import LayerView, get_policy
from kvkeep.policies import POLICIES, Chunk, Policy, Replayed, window_attention, window_mass
from kvkeep.spec import Drafted
from policy_views import rope_of

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def random(shape: tuple[int, ...], dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return mx.array(values).astype(dtype)


def reference(
    queries: mx.array,
    keys: mx.array,
    scale: float,
    sinks: mx.array | None = None,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """Float64 weights [H_q, W, T]; causal unless a bias [H_q, W, T] stands in for it."""
    q, k = (np.asarray(a.astype(mx.float32)).astype(np.float64) for a in (queries, keys))
    heads, width, _ = q.shape
    length = k.shape[1]
    logits = q @ np.repeat(k, heads // len(k), axis=0).swapaxes(1, 2) * scale
    if bias is None:
        hidden = np.arange(length) > (length - width + np.arange(width))[:, None]
        bias = np.where(hidden, -np.inf, 0.0)
    logits = logits + bias
    if sinks is not None:
        extra = np.asarray(sinks.astype(mx.float32))[:, None, None]
        extra = np.broadcast_to(extra, (heads, width, 1))
        logits = np.concatenate([logits, extra], axis=-1)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True))[..., :length]


def weights_of(queries: mx.array, keys: mx.array, scale: float, **more: object) -> np.ndarray:
    """`window_attention` with a reduction that reduces nothing: [H_q, W, T]."""
    out = window_attention(queries, keys, scale, lambda w: w, **more)  # type: ignore[arg-type]
    return np.asarray(out).reshape(queries.shape[0], queries.shape[1], keys.shape[1])


@pytest.fixture
def many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "PIECE_BYTES", 1)  # 64 keys a piece, the least


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "length"),
    [(4, 4, 1, 1), (4, 2, 5, 5), (6, 2, 3, 64), (6, 2, 9, 65), (8, 1, 16, 300), (3, 3, 1, 129)],
)
def test_weights_equal_float64(
    heads: int, kv_heads: int, width: int, length: int, with_sinks: bool, dtype: mx.Dtype
) -> None:
    queries, keys = random((heads, width, 8), dtype), random((kv_heads, length, 8), dtype, 1)
    sinks = random((heads,), dtype, 2) if with_sinks else None
    expected = reference(queries, keys, 0.7, sinks)
    weights = weights_of(queries, keys, 0.7, sinks=sinks)
    np.testing.assert_allclose(weights, expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("length", [63, 64, 65, 128, 200])
def test_many_pieces_equal_one(
    length: int, with_sinks: bool, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, keys = random((6, 10, 8), dtype), random((2, length, 8), dtype, 1)
    sinks = random((6,), dtype, 2) if with_sinks else None
    calls = []

    def reduce(weights: mx.array) -> mx.array:
        calls.append(weights.shape[-1])
        return weights

    one = window_attention(queries, keys, 8**-0.5, reduce, sinks=sinks)
    assert calls == [length]
    monkeypatch.setattr(window_module, "PIECE_BYTES", 1)
    calls.clear()
    many = window_attention(queries, keys, 8**-0.5, reduce, sinks=sinks)
    assert sum(calls) == length
    assert len(calls) == -(-length // 64)
    np.testing.assert_allclose(np.asarray(many), np.asarray(one), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("many_pieces")
def test_extreme_logits_stay_finite_in_pieces() -> None:
    queries, keys = 60 * random((2, 4, 8)), 60 * random((1, 200, 8), seed=1)
    weights = weights_of(queries, keys, 1.0)
    assert np.isfinite(weights).all()
    np.testing.assert_allclose(weights, reference(queries, keys, 1.0), atol=2e-3)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize("pieces", [False, True])
def test_a_bias_takes_the_place_of_the_causal_mask(
    pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, keys = random((4, 3, 8)), random((2, 150, 8), seed=1)
    table = random((2, 2, 3, 150), seed=3)
    expected = reference(queries, keys, 1.0, bias=np.asarray(table).reshape(4, 3, 150))
    if pieces:
        monkeypatch.setattr(window_module, "PIECE_BYTES", 1)
    weights = weights_of(queries, keys, 1.0, bias=lambda a, b: table[..., a:b])
    np.testing.assert_allclose(weights, expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 3, 8, 23, 24, 100])
@pytest.mark.parametrize("length", [24, 25, 200])
def test_scoring_a_few_queries_at_a_time_gives_the_same_mass(
    length: int, chunk: int, dtype: mx.Dtype
) -> None:
    queries, keys = random((6, 24, 8), dtype), random((2, length, 8), dtype, 1)
    sinks = random((6,), mx.float32, 2)
    view = LayerView(keys, keys, queries, 0.5, 0, 1, sinks=sinks, score_chunk_size=chunk)
    mass = np.asarray(window_mass(view))
    assert mass.shape == (6, length)
    expected = reference(queries, keys, 0.5, sinks).sum(axis=1)
    np.testing.assert_allclose(mass, expected, rtol=2e-5, atol=1e-6)


def scoring_peak(policy: Policy, length: int, dtype: mx.Dtype) -> int:
    """Bytes that scoring one layer of 32 query and 8 KV heads, D 128, takes at its peak."""
    keys = mx.broadcast_to(random((8, 1, 128), dtype), (8, length, 128)) * 1
    window = policy.observation_window
    queries = random((32, window, 128), dtype, 1) if window else None
    weights = random((128, 256), dtype, 2)
    drafted = policy.draft_length
    draft = Drafted(random((32, drafted, 128), dtype, 3), random((8, drafted, 128), dtype, 4))
    view = LayerView(
        keys,
        keys,
        queries,
        128**-0.5,
        layer=0,
        n_layers=1,
        keep=length // 4,
        rope=rope_of(128),
        output_weights=lambda head: weights,
        draft=draft if drafted else None,
    )
    mx.eval(keys, weights, [] if queries is None else queries)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(policy.score(view))
    return mx.get_peak_memory() - before


MB = 2**20
PIECEWISE = (window_module, grouping_module, pieces_module, lagkv_module, criticalkv_module)


# Arrays [32, T] float32 that a policy may hold beside its pieces: CAKE has two moments, each
# as a sum and as the part that is added to it.
HELD = {"cake": 4, "span": 4, "lookahead": 4}
ACCUMULATING = sorted(n for n in POLICIES if get_policy(n).needs & {"attention", "replay"})


@pytest.mark.parametrize("name", ACCUMULATING)
def test_accumulating_memory_is_bounded(name: str) -> None:
    """A chunk of 64 queries over many keys: the weights of all of them would take 256 MB."""
    keys = random((8, 32_768, 64), mx.float16)
    policy = get_policy(name)
    accumulator = policy.accumulator()
    assert accumulator is not None
    queries = random((32, 64, 64), mx.float16, 1)
    mx.eval(keys, queries)
    end = keys.shape[1]
    replayed = Replayed(end - 64, 0, end - 64) if "replay" in policy.needs else None
    chunk = Chunk(queries, keys, keys, 0.125, end - 64, rope=rope_of(64), replayed=replayed)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    accumulator.add(chunk)
    mx.eval(list(accumulator.finish().values()))
    assert mx.get_peak_memory() - before <= 80 * MB


@pytest.mark.parametrize("name", sorted({*POLICIES} - {*ACCUMULATING}))
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_scoring_memory_is_bounded(
    name: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of the slow test below with everything, pieces as well, a quarter the size."""
    length = 32_768
    quarter = window_module.PIECE_BYTES // 4
    for module in PIECEWISE:
        monkeypatch.setattr(module, "PIECE_BYTES", quarter)
    policy = get_policy(name)
    if policy.observation_window > 8:
        policy = get_policy(name, window=8)
    assert scoring_peak(policy, length, dtype) <= 16 * MB + HELD.get(name, 1) * 4 * 32 * length


@pytest.mark.slow  # about a minute: every window query meets every key twice
@pytest.mark.parametrize("name", ["snapkv", "snapkv-d"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("window", [8, 64])
def test_scoring_memory_is_bounded_at_131072_positions(
    name: str, dtype: mx.Dtype, window: int
) -> None:
    length = 131_072
    policy = get_policy(name, window=window)
    assert scoring_peak(policy, length, dtype) <= 64 * MB + 4 * 32 * length
