"""One decode step on a compact cache of R rows, against a stock cache that holds just R.

The stock cache of R rows is the bound: a compact cache cannot be faster, since it attends
to as many rows. What is lost against it is the price of keeping positions. Against the
exact cache of all T rows is what a user gains.
"""

from __future__ import annotations

import functools
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx_lm.models.base as base
from mlx_lm.models.base import create_attention_mask
from results import Result, Target
from workloads import (
    Options,
    Store,
    compact_cache,
    row_shape,
    tiny_llama,
)

from kvkeep.attention import install, remove
from kvkeep.bench import interleaved, random_rows, seconds, stock_cache

Step = Callable[[list[Any]], mx.array]

TARGET = Target("at least", 0.97)
UNIT = "ms/layer"
PLACEMENTS = 3  # fresh buffers each: where they come to lie in memory moves a time by percents
HEADS, KV_HEADS, DIM, LAYERS = 32, 8, 128, 8
BOUND, EXACT = "stock R rows", "stock T rows"
COMPACT: dict[Store, str] = {"shared": "compact, shared", "per-head": "compact, per head"}


@dataclass(frozen=True)
class Size:
    """T positions of which R rows are left, and the rounds that it takes to measure.

    Attributes:
        length: T.
        rows: R.
        rounds: per placement of the buffers.
        exact_rounds: against the exact cache, whose step takes far longer.
    """

    length: int
    rows: int
    rounds: int
    exact_rounds: int

    def __str__(self) -> str:
        return f"T {self.length} R {self.rows}"


def run(options: Options) -> list[Result]:
    """Attention alone, a whole small model, and the Python part of both."""
    sizes = [Size(4096, 512, 60, 8), Size(32_768, 2048, 25, 3)]
    if options.quick:
        sizes = [Size(64, 16, 2, 2)]
    install()
    results = []
    for size in sizes:
        results += attention_step(size, options.quick)
        results += model_step(size, options.quick)
    return [*results, *python_cost(100 if options.quick else 5000)]


def compared(
    case: str, layers: int, step: Step, shape: tuple[int, int], size: Size
) -> list[Result]:
    """Milliseconds per layer and token: compact against stock, with R rows and with T.

    Args:
        step: one token through these layers' caches.
        shape: KV heads and head dimension.
    """
    measured: dict[str, list[float]] = {}
    for _ in range(PLACEMENTS):
        caches = same_rows(layers, shape, size.rows, size.length)
        steps = {name: _timed(held, step) for name, held in caches.items()}
        for name, times in interleaved(steps, size.rounds, warmup=3).items():
            measured.setdefault(name, []).extend(times)
    best = COMPACT["per-head"]
    held = {
        EXACT: [stock_cache(*random_rows(shape[0], size.length, shape[1])) for _ in range(layers)],
        best: same_rows(layers, shape, size.rows, size.length)[best],
    }
    steps = {name: _timed(caches, step) for name, caches in held.items()}
    exact = interleaved(steps, size.exact_rounds)
    against_bound = [
        Result(case, name, measured[name], UNIT, BOUND, measured[BOUND], target=TARGET)
        for name in COMPACT.values()
    ]
    return [*against_bound, Result(case, best, exact[best], UNIT, EXACT, exact[EXACT])]


def same_rows(layers: int, shape: tuple[int, int], rows: int, length: int) -> dict[str, list[Any]]:
    """The bound and the compact caches, all of the same R rows per layer."""
    stored = [random_rows(shape[0], rows, shape[1]) for _ in range(layers)]
    caches: dict[str, list[Any]] = {BOUND: [stock_cache(*pair) for pair in stored]}
    for store, name in COMPACT.items():
        caches[name] = [compact_cache(*pair, length, store) for pair in stored]
    return caches


def _timed(caches: list[Any], step: Step) -> Callable[[], float]:
    """Time of one step; its token is taken back afterwards, so that R stays R."""

    def timed() -> float:
        elapsed = seconds(lambda: mx.eval(step(caches)))
        for cache in caches:
            cache.trim(1)
        return 1e3 * elapsed / len(caches)

    return timed


# -- attention layers on their own -----------------------------------------------------


def attention_step(size: Size, quick: bool) -> list[Result]:
    """Append, mask and attention."""
    heads, kv_heads, dim, layers = (4, 2, 16, 2) if quick else (HEADS, KV_HEADS, DIM, LAYERS)
    token = mx.random.normal((1, heads, 1, dim)), *random_rows(kv_heads, 1, dim)
    mx.eval(token)
    _require_equal(size, token)
    case = f"attention, {layers} layers, {heads}/{kv_heads} heads, D {dim}, {size}"
    return compared(case, layers, lambda held: attend(held, *token), (kv_heads, dim), size)


def attend(caches: list[Any], queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """One token through attention layers, each one's output being the next one's query."""
    mask: Any = create_attention_mask(queries[:, 0], caches[0])
    for cache in caches:
        rows = cache.update_and_fetch(keys, values)
        queries = base.scaled_dot_product_attention(
            queries, *rows, cache=cache, scale=queries.shape[-1] ** -0.5, mask=mask
        )
    return queries


def _require_equal(size: Size, token: tuple[mx.array, ...]) -> None:
    """A bound that computes something else is none."""
    rows = random_rows(token[1].shape[1], size.rows, token[1].shape[3])
    bound = attend([stock_cache(*rows)], *token)
    for store, name in COMPACT.items():
        output = attend([compact_cache(*rows, size.length, store)], *token)
        if not mx.array_equal(output, bound):
            raise RuntimeError(f"{name}: another result than from {BOUND}")


# -- a whole model ---------------------------------------------------------------------


def model_step(size: Size, quick: bool) -> list[Result]:
    """A small llama: forward and greedy choice."""
    model = tiny_llama(quick)
    case = f"whole step, llama of {len(model.layers)} layers, {size}"
    token = mx.array([[1]])
    return compared(
        case,
        len(model.layers),
        lambda held: decode_step(model, held, token),
        row_shape(model),
        size,
    )


def decode_step(model: Any, caches: list[Any], token: mx.array) -> mx.array:
    """The next token, greedily."""
    return mx.argmax(model(token, cache=caches)[:, -1], axis=-1)


# -- Python ----------------------------------------------------------------------------


def python_cost(calls: int) -> list[Result]:
    """Microseconds of Python per layer and token, nothing evaluated.

    The stock cache runs without the attention seam: what mlx-lm alone would cost.
    """
    rows = random_rows(KV_HEADS, 32, DIM)
    token = mx.random.normal((1, HEADS, 1, DIM)), *random_rows(KV_HEADS, 1, DIM)
    mx.eval(token)
    contenders: dict[str, Any] = {BOUND: stock_cache(*rows)}
    for store, name in COMPACT.items():
        contenders[name] = compact_cache(*rows, 64, store)
    measured = interleaved(
        {
            name: functools.partial(_build_time, cache, token, calls, name != BOUND)
            for name, cache in contenders.items()
        },
        rounds=7,
    )
    install()
    case = "Python per layer: offset twice, mask, append, attention"
    return [
        Result(case, name, measured[name], "us", BOUND, measured[BOUND])
        for name in COMPACT.values()
    ]


def _build_time(cache: Any, token: tuple[mx.array, ...], calls: int, seam: bool) -> float:
    (install if seam else remove)()
    queries, keys, values = token

    def build() -> None:
        _ = cache.offset, cache.offset  # a model rotates queries and keys by it
        mask: Any = create_attention_mask(queries[:, 0], cache)
        rows = cache.update_and_fetch(keys, values)
        base.scaled_dot_product_attention(queries, *rows, cache=cache, scale=0.1, mask=mask)

    def settle() -> None:
        mx.eval(cache.keys, cache.values)
        cache.trim(count)

    times = []
    count = min(calls, 100)  # rows that the buffer has room for
    for _ in range(calls // count):
        times.append(timeit.timeit(build, number=count) / count)
        settle()
    return 1e6 * min(times)
