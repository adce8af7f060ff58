"""Scores of a cached prefix from a window of tokens that is not in the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from kvkeep.attention import WindowObserver, observed_prefill
from kvkeep.compaction import checked_prompt
from kvkeep.errors import ConfigError
from kvkeep.policies import check_options, pooled, window_attention
from kvkeep.spec import checked_count
from kvkeep.suite.reading import copy_cache, exact_layers


def attention_window_scores(
    model: Any,
    cache: list[Any],
    window_token_ids: Sequence[int] | np.ndarray | mx.array,
    pool_kernel: int = 7,
    pooling: str = "max",
) -> list[np.ndarray]:
    """How much attention a window of tokens pays to each cached position, per layer.

    `window_token_ids` are the tokens that *follow* the cached prefix, say a question after
    its document. They are fed on a copy of the cache, at positions T, T + 1, …; they are not
    in `cache` and get no score. While they run, the written copy takes as much memory as the
    cache itself.

    Per layer, with q the window's post-RoPE queries and k the T cached keys:

        a = softmax_T(q k^T * scale)                  float32, [H_q, W, T]
        s = mean of a over the window and each KV head's group of query heads
        score = pool(s)                               kernel positions, edge padding

    The softmax is over the prefix alone (with the model's attention sinks, where it has
    any): what the window's tokens pay to each other does not count. Pooling comes after the
    mean; max pooling would differ the other way round.

    Source: the third of the pull requests that this project grew from, after Li et al.,
    "SnapKV", arXiv:2404.14469, section 4.

    Args:
        model: an mlx-lm model.
        cache: the prefilled cache of one request, T positions; stays untouched.
        window_token_ids: W >= 1 token ids.
        pool_kernel: odd width of the pooling, in positions.
        pooling: "max", "avg" or "none".

    Returns:
        One [H_kv, T] float32 array for each full-attention layer, in cache order; higher =
        keep.

    Raises:
        PromptError: the window is empty or unreadable.
        ConfigError: a pooling option is out of range.
        CacheError: the cache is empty, compact, quantised or a batch.
        UnsupportedModelError: the model's queries cannot be seen.
    """
    kernel = checked_pooling(pool_kernel, pooling)
    tokens = checked_prompt(window_token_ids)
    layers, length = exact_layers(cache)
    scratch, observers = fed_on_copy(model, cache, tokens, layers, "attention")
    scores = []
    for index in layers:
        mass = _mean_attention(scratch[index].keys[0, :, :length], observers[index])
        scores.append(np.array(pooled(mass, kernel, pooling, edge=True)))
        scratch[index] = None  # its rows are not needed any more
    return scores


def fed_on_copy(
    model: Any,
    cache: list[Any],
    tokens: list[int],
    layers: list[int],
    policy: str,
    window: int | None = None,
) -> tuple[list[Any], Mapping[int, WindowObserver]]:
    """Feed tokens on a copy of the cache under observation: (the copy, observers by layer).

    Args:
        window: last queries to keep, at most; None keeps those of all tokens.

    Raises:
        UnsupportedModelError: the seam cannot see the model's queries.
    """
    scratch = copy_cache(cache)
    window = len(tokens) if window is None else window
    seen = observed_prefill(model, tokens, scratch, layers, window=window, policy=policy)
    return scratch, seen.observers


def checked_pooling(pool_kernel: int, pooling: str) -> int:
    """The kernel as a Python int.

    Raises:
        ConfigError: it is no odd number >= 1, or the kind is unknown.
    """
    kernel = checked_count("pool_kernel", pool_kernel, 1)
    if not isinstance(pooling, str):
        raise ConfigError("bad value for pooling", expected="a name", received=repr(pooling))
    check_options(pool_kernel=kernel, pooling=pooling)
    return kernel


def _mean_attention(keys: mx.array, observer: WindowObserver) -> mx.array:
    """[H_kv, T] float32: mean over window and group of the softmax over keys [H_kv, T, D]."""
    assert observer.queries is not None  # require_visible refused models that show none
    return window_attention(
        observer.queries[0],
        keys,
        observer.scale,
        lambda weights: weights.mean(axis=(1, 2)),
        sinks=observer.sinks,
        bias=lambda start, stop: mx.array(0.0),  # the whole prefix lies before the window
    )
