"""The stock model over the full cache, with the evicted rows hidden: what eviction must equal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import base
from mlx_lm.models.cache import CacheList, make_prompt_cache

from kvkeep import LayerSelection
from kvkeep.attention import install, remove

_NAME = "scaled_dot_product_attention"

#: Models whose own attention reads nothing but the mask that their first cache makes.
BY_MASK = {"deepseek_v32", "gear", "gemma2", "glm_moe_dsa", "plamo2"}


def leaves(cache: Sequence[Any]) -> list[Any]:
    """The caches of a cache list, those inside a `CacheList` one by one."""
    found: list[Any] = []
    for layer in cache:
        found += layer.caches if isinstance(layer, CacheList) else [layer]
    return found


def fed(model: Any, cache: list[Any], tokens: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    """Logits [n, vocab] of tokens that are appended `steps` at a time."""
    rows, done = [], 0
    for count in steps:
        out = model(mx.array(list(tokens[done : done + count]))[None], cache=cache)
        mx.eval(out, [c.state for c in cache])
        rows.append(np.asarray(out[0].astype(mx.float32)))
        done += count
    assert done == len(tokens)
    return np.concatenate(rows)


def prefilled(model: Any, tokens: Sequence[int], step: int) -> list[Any]:
    """mlx-lm's own cache list of these tokens."""
    cache = make_prompt_cache(model)
    steps = [min(step, len(tokens) - start) for start in range(0, len(tokens), step)]
    fed(model, cache, tokens, steps)
    return cache


def masked_logits(
    kind: str,
    model: Any,
    cache: list[Any],
    length: int,
    kept: Mapping[int, LayerSelection],
    tokens: Sequence[int],
    steps: Sequence[int],
) -> np.ndarray:
    """Logits of `tokens` after a stock prefill whose rows are hidden but for the kept ones.

    Args:
        cache: mlx-lm's own, of `length` tokens; it is used up.
        kept: by index among the `leaves`.
        steps: how many tokens go in at a time.
    """
    found = leaves(cache)
    hidden = {}
    for index, chosen in kept.items():
        table = np.ones((len(chosen.heads), length), bool)
        for row, head in zip(table, chosen.heads, strict=True):
            row[head] = False
        hidden[index] = table
    if kind in BY_MASK:
        for index, table in hidden.items():
            _hide_in_mask(found[index], table)
        return fed(model, cache, tokens, steps)
    owners = _Owners(found)
    with _patched(lambda stock: _masking(stock, owners, hidden)) as seen:
        logits = fed(model, cache, tokens, steps)
    assert seen >= set(hidden), f"attention of {set(hidden) - seen} was never masked"
    return logits


class _Owners:
    """Which of the caches an attention call reads."""

    def __init__(self, found: Sequence[Any]) -> None:
        self.found = list(found)
        self.handed: dict[int, tuple[Any, int]] = {}
        for index, leaf in enumerate(self.found):
            for name in ("update_and_fetch", "keys_and_values"):
                if hasattr(leaf, name):
                    setattr(leaf, name, self._noting(getattr(leaf, name), index))

    def _noting(self, method: Callable[..., Any], index: int) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            rows = method(*args)
            self.handed[id(rows[0])] = (rows[0], index)  # held, so that no other gets its id
            return rows

        return call

    def of(self, keys: Any, cache: Any) -> int | None:
        if id(keys) in self.handed:
            return self.handed[id(keys)][1]
        return next((i for i, leaf in enumerate(self.found) if leaf is cache), None)


def _masking(
    stock: Callable[..., mx.array], owners: _Owners, hidden: Mapping[int, np.ndarray]
) -> tuple[Callable[..., mx.array], set[int]]:
    seen: set[int] = set()

    def call(
        q: mx.array, k: mx.array, v: mx.array, cache: Any, scale: float, mask: Any, **more: Any
    ) -> mx.array:
        index = owners.of(k, cache)
        if index is not None and index in hidden:
            seen.add(index)
            mask = _with_hidden(mask, hidden[index], q.shape[1], q.shape[2], k.shape[2])
        return stock(q, k, v, cache=cache, scale=scale, mask=mask, **more)

    return call, seen


def _allowed(hidden: np.ndarray, n: int, rows: int) -> np.ndarray:
    """Bool [heads, n, rows]: causal, less what is hidden."""
    table = np.arange(rows)[None] <= np.arange(rows - n, rows)[:, None]
    table = np.repeat(table[None], len(hidden), axis=0)
    table[:, :, : hidden.shape[1]] &= ~hidden[:, None]
    return table


def _with_hidden(mask: Any, hidden: np.ndarray, heads: int, n: int, rows: int) -> mx.array:
    allowed = _allowed(hidden, n, rows)
    if len(allowed) > 1:
        allowed = np.repeat(allowed, heads // len(allowed), axis=0)
    table = mx.array(allowed[None])
    if mask is None or isinstance(mask, str):
        return table
    return table & mask if mask.dtype == mx.bool_ else mx.where(table, mask, -mx.inf)


def _hide_in_mask(leaf: Any, hidden: np.ndarray) -> None:
    assert len(hidden) == 1, "one mask serves all heads"

    def make_mask(n: int, *_: Any, **__: Any) -> mx.array:
        return mx.array(_allowed(hidden, n, leaf.offset + n)[None])

    leaf.make_mask = make_mask


@contextlib.contextmanager
def _patched(make: Callable[[Any], tuple[Any, set[int]]]) -> Iterator[set[int]]:
    """Another attention function in mlx-lm's model modules; kvkeep's is put back after it."""
    remove()
    stock = base.scaled_dot_product_attention
    call, seen = make(stock)
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("mlx_lm.models.")]
    held = [m for m in modules if m.__dict__.get(_NAME) is stock]
    for module in held:
        setattr(module, _NAME, call)
    try:
        yield seen
    finally:
        for module in held:
            setattr(module, _NAME, stock)
        install()


def attention_mass(
    model: Any, prompt: Sequence[int], layers: Sequence[int], window: int
) -> dict[int, np.ndarray]:
    """Attention of the last queries to each row, float64, summed over all that read the row.

    From the arguments of the stock model's own attention calls, in one prefill.

    Returns:
        By leaf, [H_kv, T]: which KV head a head of attention reads is found by its keys; where
        none is the same (expanded latent rows), all read the first.
    """
    cache = make_prompt_cache(model)
    owners, found = _Owners(leaves(cache)), leaves(cache)
    calls: list[tuple[int, tuple[Any, ...]]] = []

    def make(stock: Any) -> tuple[Any, set[int]]:
        def call(q: Any, k: Any, v: Any, cache: Any, scale: float, mask: Any, **more: Any) -> Any:
            index = owners.of(k, cache)
            if index is not None and index in layers:
                calls.append((index, (q, k, scale, mask, more.get("sinks"))))
            return stock(q, k, v, cache=cache, scale=scale, mask=mask, **more)

        return call, set()

    with _patched(make):
        fed(model, cache, prompt, [len(prompt)])
    mass: dict[int, np.ndarray] = {}
    for index, call in calls:
        weights = _weights(call, window)
        own, keys = np.asarray(found[index].keys[0]), np.asarray(call[1][0])
        total = mass.setdefault(index, np.zeros((len(own), len(prompt))))
        for head, row in enumerate(weights):
            at = head * len(keys) // len(weights)
            same = [h for h in range(len(own)) if _same(own[h], keys[at])]
            total[same[0] if same else 0] += row
    return mass


def _same(own: np.ndarray, keys: np.ndarray) -> bool:
    return own.shape[1] == keys.shape[1] and np.array_equal(own[: len(keys)], keys)


def _weights(call: tuple[Any, ...], window: int) -> np.ndarray:
    """Softmax weights in float64 of the last queries, summed over them: [H_q, T]."""
    q, k, scale, mask, sinks = call
    queries, keys = np.asarray(q[0], np.float64), np.asarray(k[0], np.float64)
    keys = np.repeat(keys, len(queries) // len(keys), axis=0)
    logits = queries @ keys.swapaxes(1, 2) * scale
    count, rows = logits.shape[1:]
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        logits = logits + np.asarray(mask.astype(mx.float32), np.float64)[0]
    logits[:, np.triu(np.ones((count, rows), bool), rows - count + 1)] = -np.inf
    logits = logits[:, -window:]
    if sinks is not None:
        extra = np.asarray(sinks.astype(mx.float32), np.float64)[:, None, None]
        logits = np.concatenate([logits, np.broadcast_to(extra, (*logits.shape[:2], 1))], axis=2)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights[..., :rows].sum(axis=1)
