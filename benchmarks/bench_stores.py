"""Unequal heads: what the ragged and the union store take, against equal heads of the same total.

The total is the same everywhere: R rows per KV head on average. The per-head store keeps R in
each head and is the bound; the ragged store keeps as many in all, in a few groups of heads of
equal length; the union store keeps what any head keeps, under a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from bench_decode import attend, decode_step
from mlx_lm.models.cache import KVCache
from results import Result, Target
from workloads import DEMO_SHAPE, Options, row_shape, tiny_llama

from kvkeep import LayerSelection, Selection
from kvkeep.allocation import Demand, get_allocation, grouped_counts
from kvkeep.attention import install
from kvkeep.bench import interleaved, random_rows, seconds
from kvkeep.compaction import store_selection
from kvkeep.spec import HeadProfile

PER_HEAD, RAGGED, UNION = "per head", "ragged", "union + mask"
DUO = "ragged, duo"
STEP = Target("at most", 1.15)
BYTES = Target("at most", 1.05)
PLACEMENTS = 3
GROUPS = 4  # EvictionConfig.max_groups
#: Rows of a layer's heads around the mean, as adaptive heads spread them on the demo model.
SPREAD = (0.45, 0.6, 0.75, 0.85, 1.0, 1.2, 1.45, 1.7)


@dataclass(frozen=True)
class Size:
    """T positions of which R rows per head are left on average, and the rounds to measure."""

    length: int
    rows: int
    rounds: int

    def __str__(self) -> str:
        return f"T {self.length} R {self.rows}"


def run(options: Options) -> list[Result]:
    """Attention alone, two whole models, and bytes."""
    install()
    if options.quick:
        size, models = Size(64, 16, 2), [tiny_llama(quick=True)]
        shapes = [(4, 2, 16, 2)]
    else:
        size, shapes = Size(4096, 512, 30), [(32, 8, 128, 4)]
        models = [tiny_llama(quick=False), DEMO_SHAPE.build()]
    results = []
    for heads, kv_heads, dim, layers in shapes:
        token = mx.random.normal((1, heads, 1, dim)), *random_rows(kv_heads, 1, dim)
        mx.eval(token)
        case = f"attention, {layers} layers, {heads}/{kv_heads} heads, D {dim}, {size}"
        step = functools.partial(_attend, token=token)
        results += compared(case, layers, step, (kv_heads, dim), size)
    for model in models:
        layers = len(model.layers)
        case = f"whole step, llama of {layers} layers, {row_shape(model)[0]} KV heads, {size}"
        step = functools.partial(_decode, model=model)
        results += compared(case, layers, step, row_shape(model), size)
    return results


def _attend(caches: list[Any], token: tuple[mx.array, ...]) -> mx.array:
    return attend(caches, *token)


def _decode(caches: list[Any], model: Any) -> mx.array:
    return decode_step(model, caches, mx.array([[1]]))


def compared(
    case: str,
    layers: int,
    step: Callable[[list[Any]], mx.array],
    shape: tuple[int, int],
    size: Size,
) -> list[Result]:
    """Time of a step and bytes, each store against the per-head store."""
    times: dict[str, list[float]] = {}
    live: dict[str, list[float]] = {}
    active: dict[str, list[float]] = {}
    for placement in range(PLACEMENTS):
        caches = {}
        for name in (PER_HEAD, RAGGED, DUO, UNION):
            mx.clear_cache()
            before = mx.get_active_memory()
            caches[name] = stored(name, layers, shape, size, placement)
            active.setdefault(name, []).append((mx.get_active_memory() - before) / 1e6)
            live.setdefault(name, []).append(sum(c.nbytes for c in caches[name]) / 1e6)
        steps = {name: _timed(held, step) for name, held in caches.items()}
        for name, found in interleaved(steps, size.rounds, warmup=3).items():
            times.setdefault(name, []).extend(found)
    results = []
    for name in (RAGGED, DUO, UNION):
        # The union's cost is shown, not promised; the promise is about steps of a whole model.
        told = name == UNION
        for unit, figures, target in (
            ("ms/step", times, STEP if case.startswith("whole step") else None),
            ("MB live", live, BYTES),
            ("MB active", active, BYTES),
        ):
            results.append(
                Result(
                    f"{case}: {unit}",
                    name,
                    figures[name],
                    unit,
                    PER_HEAD,
                    figures[PER_HEAD],
                    ratio="subject / baseline",
                    target=None if told else target,
                )
            )
    return results


def _timed(caches: list[Any], step: Callable[[list[Any]], mx.array]) -> Callable[[], float]:
    """Time of one step; its token is taken back afterwards, so that R stays R."""

    def timed() -> float:
        elapsed = seconds(lambda: mx.eval(step(caches)))
        for cache in caches:
            cache.trim(1)
        return 1e3 * elapsed

    return timed


def stored(name: str, layers: int, shape: tuple[int, int], size: Size, seed: int) -> list[Any]:
    """A cache list of `layers` layers with random rows, evicted down to R per head on average."""
    kv_heads, dim = shape
    draw = np.random.default_rng(seed)
    cache, chosen = [], {}
    counts = _counts(name, layers, kv_heads, size)
    for layer in range(layers):
        exact = KVCache()
        exact.keys, exact.values = random_rows(kv_heads, size.length, dim)
        exact.offset = size.length
        heads = [
            np.sort(draw.choice(size.length, int(count), replace=False)) for count in counts[layer]
        ]
        one = Selection(size.length, {0: LayerSelection(tuple(heads))})
        cache.append(store_selection([exact], one, _store(name)).cache[0])
        chosen[layer] = heads
    mx.eval([layer.state for layer in cache])
    return cache


def _store(name: str) -> str:
    return "union" if name == UNION else "auto"


def _counts(name: str, layers: int, kv_heads: int, size: Size) -> list[np.ndarray]:
    """Rows per head; the mean is R in each layer, over the model for duo."""
    if name == PER_HEAD:
        return [np.full(kv_heads, size.rows)] * layers
    if name == DUO:
        draw = np.random.default_rng(1)
        scores = {layer: tuple(draw.random(kv_heads)) for layer in range(layers)}
        profile = HeadProfile("any", scores, sinks=4, recent=size.rows // 8, method="drawn")
        demand = Demand(
            keep=size.rows,
            heads=(kv_heads,) * layers,
            held=(np.full(kv_heads, size.length),) * layers,
            layers=tuple(range(layers)),
        )
        counts = get_allocation("duo", profile=profile).counts(demand)
        return [grouped_counts(layer, GROUPS) for layer in counts]
    spread = np.interp(np.linspace(0, 1, kv_heads), np.linspace(0, 1, len(SPREAD)), SPREAD)
    rows = np.floor(spread / spread.mean() * size.rows).astype(np.int64)
    rows[-1] += size.rows * kv_heads - rows.sum()
    return [grouped_counts(np.roll(rows, layer), GROUPS) for layer in range(layers)]
