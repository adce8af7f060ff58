"""2,000 tokens on a compact cache: does a token cost the same at the end as at the start?

It attends to more rows by then, and so does the stock cache that started with as many: the
two decode in turns, token by token, and what the rows cost drops out of the ratio.
"""

from __future__ import annotations

import functools
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from bench_decode import BOUND, COMPACT, decode_step, same_rows
from results import Result, Target
from workloads import Options, row_shape, tiny_llama

from kvkeep.attention import install
from kvkeep.bench import interleaved, seconds

LENGTH, ROWS, TOKENS, END = 4096, 512, 2000, 200
PASSES = 3  # with fresh buffers each: where they lie in memory matters too
BLOCK = 20  # tokens that make one figure
TIME = Target("at most", 1.03)
ALLOCATIONS = Target("at most", 1.1)
GROWTH = Target("at most", 16)


def run(options: Options) -> list[Result]:
    """Time per token, and what Python allocates per token."""
    tokens, end, passes = (80, 40, 2) if options.quick else (TOKENS, END, PASSES)
    model = tiny_llama(options.quick)
    install()
    timed = [interleaved(_decoders(model), tokens, warmup=3) for _ in range(passes)]
    case = f"llama of {len(model.layers)} layers, {tokens} tokens from R {ROWS}, T {LENGTH}"
    results = [_last_against_first(case, name, timed, end) for name in COMPACT.values()]
    for name in (BOUND, *COMPACT.values()):
        results += _allocations(case, name, _decoders(model)[name], tokens, end)
    return results


def _decoders(model: Any) -> dict[str, Callable[[], float]]:
    """Fresh caches; each call decodes one more token and returns its milliseconds."""
    caches = same_rows(len(model.layers), row_shape(model), ROWS, LENGTH)

    def one(caches: list[Any]) -> float:
        token = mx.array([[1]])
        return 1e3 * seconds(lambda: mx.eval(decode_step(model, caches, token)))

    return {name: functools.partial(one, layers) for name, layers in caches.items()}


def _last_against_first(
    case: str, name: str, passes: Sequence[dict[str, list[float]]], end: int
) -> Result:
    """Compact over stock at the end, against the same at the start, block by block."""
    first, last, told = [], [], {"first": [0.0, 0.0], "last": [0.0, 0.0]}
    for timed in passes:
        mine, stock = _blocks(timed[name]), _blocks(timed[BOUND])
        count = end // BLOCK
        relative = mine / stock
        first += relative[:count].tolist()
        last += relative[-count:].tolist()
        for part, blocks in (("first", slice(0, count)), ("last", slice(-count, None))):
            told[part][0] += float(mine[blocks].mean()) / len(passes)
            told[part][1] += float(stock[blocks].mean()) / len(passes)
    note = f"{name}: " + ", ".join(
        f"{part} {end} tokens {own:.3f} ms each, stock {other:.3f} ms"
        for part, (own, other) in told.items()
    )
    return Result(
        case,
        f"{name} / stock, last {end} tokens",
        last,
        "x",
        f"first {end}",
        first,
        "subject / baseline",
        TIME,
        note,
    )


def _blocks(times: Sequence[float]) -> np.ndarray:
    """The lower quartile of each block of tokens: other load only ever adds to a time."""
    whole = len(times) // BLOCK * BLOCK
    return np.percentile(np.reshape(times[:whole], (-1, BLOCK)), 25, axis=1)


def _allocations(
    case: str, name: str, decode: Callable[[], float], tokens: int, end: int
) -> list[Result]:
    """Bytes that Python holds at most within a token, and for good after it."""
    decode()
    peaks, held = np.zeros(tokens), np.zeros(tokens)  # no objects of their own per token
    tracemalloc.start()
    try:
        for token in range(tokens):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            decode()
            now, peak = tracemalloc.get_traced_memory()
            peaks[token], held[token] = peak - before, now
    finally:
        tracemalloc.stop()
    ends = held[end::BLOCK]
    growth = (ends[1:] - ends[:-1]) / BLOCK
    return [
        Result(
            case,
            f"{name}: Python bytes within a token, last {end}",
            peaks[-end:].tolist(),
            "B",
            f"first {end}",
            peaks[:end].tolist(),
            "subject / baseline",
            ALLOCATIONS,
        ),
        Result(case, f"{name}: Python bytes kept per token", growth.tolist(), "B", target=GROWTH),
    ]
