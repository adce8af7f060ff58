"""Select rows of a real cache by any policy, at a matched budget; the input stays exact."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from numbers import Real
from typing import Any, TypedDict

import mlx.core as mx
import numpy as np

from kvkeep.allocation import pyramid_budgets
from kvkeep.attention import Observation, find_parts
from kvkeep.caches import row_groups
from kvkeep.compaction import checked_prompt, evict_selection
from kvkeep.errors import BudgetError, ConfigError, KvkeepError, SelectionError
from kvkeep.policies import POLICIES, Policy, get_policy
from kvkeep.selection import random_indices, select_rows, sink_recent_indices
from kvkeep.spec import Budget, LayerSelection, Selection, checked_count, named
from kvkeep.suite.reading import copy_cache, exact_layers
from kvkeep.suite.scoring import attention_window_scores, checked_pooling, fed_on_copy
from kvkeep.views import layer_view

#: Policies of the suite itself; every registered one is there as well.
SUITE_POLICIES = ("sink_recent", "random", "attention", "pyramid")
_VIEWED = frozenset({"queries", "keys", "values", "rope", "output_weights"})

#: One layer's positions: [R] for all heads, or [H_kv][R].
LayerIndices = Sequence[int] | Sequence[Sequence[int]] | Sequence[np.ndarray] | np.ndarray


class SelectionInfo(TypedDict):
    """What `select_cache` did.

    policy: its name. keep_frac: as asked. T: positions of the input. keep: rows per KV head
    (the mean over layers). compress_ms: milliseconds from scoring to evaluated rows.
    layer_budgets: rows per KV head of each full-attention layer. window_tokens: tokens that
    were fed on a copy to score (0: none were needed).
    """

    policy: str
    keep_frac: float
    T: int
    keep: int
    compress_ms: float
    layer_budgets: list[int]
    window_tokens: int


def select_positions(
    cache: list[Any], per_layer_indices: Sequence[LayerIndices | mx.array]
) -> list[Any]:
    """A new cache list that holds these positions of each full-attention layer.

    Args:
        cache: the exact cache of one request, T positions; stays untouched.
        per_layer_indices: for each full-attention layer, in cache order, ascending and unique
            positions below T: [R] for all heads, or [H_kv][R]. Layers may differ in R.

    Returns:
        Compact caches at the same `offset`; layers of other kinds are copied.

    Raises:
        SelectionError: indices are unsorted, repeated, out of range, unreadable, or for
            another number of layers.
        CacheError: the cache is empty, compact, quantised or a batch, or a layer's heads
            keep unequal numbers.
    """
    layers, length = exact_layers(cache)
    try:
        kept = [_layer_selection(entry) for entry in per_layer_indices]
    except KvkeepError:
        raise
    except (TypeError, KeyError, ValueError) as error:
        raise SelectionError(
            "unreadable positions",
            expected="for each layer [R], or [H_kv][R]",
            received=f"{type(per_layer_indices).__name__} ({error})",
        ) from None
    if len(kept) != len(layers):
        raise SelectionError(
            "positions for another number of layers",
            expected=f"{len(layers)} entries, one per full-attention layer",
            received=len(kept),
        )
    return _stored(cache, Selection(length, dict(zip(layers, kept, strict=True))))


def select_cache(
    model: Any,
    cache: list[Any],
    policy: str | Policy,
    keep_frac: float,
    window_token_ids: Sequence[int] | np.ndarray | mx.array | None = None,
    seed: int = 0,
    sinks: int = 4,
    pool_kernel: int = 7,
    pooling: str = "max",
    window_keep: int = 32,
) -> tuple[list[Any], SelectionInfo]:
    """Keep a share of a prefilled cache's rows by a policy: (new cache, what was done).

    keep = max(1, floor(keep_frac * T)) rows per KV head. Policies:

    - "sink_recent": the first `sinks` positions and the most recent others.
    - "random": `keep` positions drawn by `seed`, the same in every layer and head.
    - "attention": per KV head the highest `attention_window_scores`, the last `window_keep`
      positions forced.
    - "pyramid": the same scores, with `pyramid_budgets(keep, L, window_keep)` rows in each
      layer. A layer that would hold more than T rows hands the surplus to the others evenly,
      so the mean is `keep` exactly.
    - every registered policy, by its name with its own defaults, or as an object
      (`get_policy("snapkv", pool_kernel=5)`). Those that look at the observation window see
      the window tokens' last queries; those that need every query of the prompt, or a second
      reading of it, are refused. `sinks` first and `window_keep` last positions are
      forced; `pool_kernel` and `pooling` are theirs, not the arguments here.

    Forced positions count inside `keep` and shrink to it, the sinks first served.

    Args:
        model: an mlx-lm model.
        cache: the exact cache of one request, T positions; stays untouched.
        policy: a name, or a policy object.
        keep_frac: in (0, 1]; 1 gives a copy of the exact cache.
        window_token_ids: tokens that *follow* the cached prefix, such as the question. They
            are fed on a copy to score and are not in the returned cache: feed them to it
            next. Needed by "attention", "pyramid" and policies that read queries.
        seed: of "random".
        sinks, window_keep: first and last cached positions that stay, as said above.
        pool_kernel, pooling: of "attention" and "pyramid".

    Returns:
        The cache, at the input's `offset`, and a `SelectionInfo`.

    Raises:
        ConfigError: an unknown policy, an option out of range, or missing window tokens.
        BudgetError: `keep_frac` is not in (0, 1].
        PromptError, CacheError, UnsupportedModelError: as `attention_window_scores`.
    """
    scorer = _resolved(policy)
    name = scorer if isinstance(scorer, str) else scorer.name
    for option, value in (("sinks", sinks), ("window_keep", window_keep), ("seed", seed)):
        checked_count(option, value, 0)
    checked_pooling(pool_kernel, pooling)
    tokens = _window_for(scorer, window_token_ids)
    layers, length = exact_layers(cache)
    keep = _kept_rows(keep_frac, length)
    mx.eval([layer.state for layer in cache])  # a lazy prefill is no part of the compression
    start = time.perf_counter()
    budgets = [keep] * len(layers)
    if keep == length:
        tokens, new = [], copy_cache(cache)
    else:
        if name == "pyramid":
            budgets = _at_most(pyramid_budgets(keep, len(layers), window_keep), length)
        if scorer == "sink_recent":
            rows = [sink_recent_indices(length, keep, sinks)[None]] * len(layers)
        elif scorer == "random":
            rows = [random_indices(length, keep, seed)[None]] * len(layers)
        elif isinstance(scorer, str):
            scores = attention_window_scores(model, cache, tokens, pool_kernel, pooling)
            rows = _highest(scores, budgets, sinks=0, recent=window_keep)
        else:
            scores = _policy_scores(model, cache, layers, keep, scorer, tokens)
            rows = _highest(scores, budgets, sinks=sinks, recent=window_keep)
        kept = {i: LayerSelection(tuple(r)) for i, r in zip(layers, rows, strict=True)}
        new = _stored(cache, Selection(length, kept))
    info = SelectionInfo(
        policy=name,
        keep_frac=float(keep_frac),
        T=length,
        keep=keep,
        compress_ms=1e3 * (time.perf_counter() - start),
        layer_budgets=budgets,
        window_tokens=len(tokens),
    )
    return new, info


def _resolved(policy: str | Policy) -> str | Policy:
    """A name of the suite, or the policy object.

    Raises:
        ConfigError: the name is unknown, or the policy needs what no window shows.
    """
    if isinstance(policy, str):
        if policy in SUITE_POLICIES:
            return policy
        named("policy", policy, {**dict.fromkeys(SUITE_POLICIES), **POLICIES})
        policy = get_policy(policy)
    needs = getattr(policy, "needs", None)
    if needs is None:
        raise ConfigError(
            "unreadable policy", expected="a name or a Policy", received=type(policy).__name__
        )
    if unknown := sorted(set(needs) - _VIEWED):
        raise ConfigError(
            f"policy {policy.name!r} needs {', '.join(unknown)}, which select_cache does not have",
            expected=f"a policy that needs at most {', '.join(sorted(_VIEWED))}",
            remedy="Use compact_prompt_cache with it.",
        )
    return policy


def _window_for(policy: str | Policy, window_token_ids: Any) -> list[int]:
    """The window's tokens where the policy needs them, else none.

    Raises:
        ConfigError: they are missing.
        PromptError: they are unreadable.
    """
    tokens = [] if window_token_ids is None else checked_prompt(window_token_ids)
    if isinstance(policy, str):
        name, needed = policy, policy in ("attention", "pyramid")
    else:
        name, needed = policy.name, "queries" in policy.needs
    if needed and not tokens:
        raise ConfigError(
            f"policy {name!r} needs window_token_ids",
            expected="the tokens that follow the cached prefix, at least 1",
            received="None",
            remedy="Pass the question's tokens, or use 'sink_recent' or 'random'.",
        )
    return tokens if needed else []


def _kept_rows(keep_frac: float, length: int) -> int:
    real = isinstance(keep_frac, Real) and not isinstance(keep_frac, bool)
    if not real or not 0 < keep_frac <= 1:
        raise BudgetError(
            "bad value for keep_frac",
            expected="a number more than 0 and at most 1",
            received=repr(keep_frac),
        )
    return Budget(float(keep_frac), "share").rows(length)


def _highest(
    scores: Sequence[Any], budgets: list[int], *, sinks: int, recent: int
) -> list[np.ndarray]:
    """Each layer's kept positions [H_kv or 1, rows], from scores [H_kv or 1, T]."""
    return [
        select_rows(score, rows, sinks=sinks, recent=recent)
        for score, rows in zip(scores, budgets, strict=True)
    ]


def _at_most(counts: list[int], most: int) -> list[int]:
    """Counts capped at `most`, the surplus spread evenly over the others; the sum stays."""
    surplus = sum(max(count - most, 0) for count in counts)
    counts = [min(count, most) for count in counts]
    while surplus:
        room = [layer for layer, count in enumerate(counts) if count < most]
        share, extra = divmod(surplus, len(room))
        for rank, layer in enumerate(room):
            more = min(most - counts[layer], share + (rank < extra))
            counts[layer] += more
            surplus -= more
    return counts


def _policy_scores(
    model: Any,
    cache: list[Any],
    layers: list[int],
    keep: int,
    policy: Policy,
    tokens: list[int],
) -> list[mx.array]:
    """A registered policy's scores [H_kv or 1, T] of each layer's cached positions."""
    length = cache[layers[0]].offset
    parts = find_parts(model, cache, layers, policy.needs, policy.name)
    seen = Observation({}, parts=parts)
    if tokens:
        width = max(policy.observation_window, 1)
        cache, observers = fed_on_copy(model, cache, tokens, layers, policy.name, width)
        seen = Observation(observers, parts=parts)
    scores = []
    for index in layers:
        (group,) = row_groups(cache[index])
        # The window's own rows rank on top and are not in the cache: they are no part of keep.
        rows = keep + len(tokens)
        view = layer_view(group, index, seen, n_layers=len(layers), keep=rows)
        score = policy.score(view)[:, :length]
        if policy.scope == "model":
            score = score.sum(axis=0, keepdims=True)
        mx.eval(score)
        scores.append(score)
    if policy.scope == "model":
        return [sum(scores[1:], scores[0])] * len(layers)
    return scores


def _layer_selection(entry: Any) -> LayerSelection:
    entry = np.asarray(entry) if isinstance(entry, mx.array) else entry
    nested = len(entry) > 0 and np.ndim(entry[0]) == 1
    return LayerSelection(tuple(entry) if nested else (entry,))


def _stored(cache: list[Any], selection: Selection) -> list[Any]:
    """Compact layers, and copies of the others, which a decode would write to."""
    stored = evict_selection(cache, selection).cache
    return [
        layer if index in selection.layers else copy.deepcopy(layer)
        for index, layer in enumerate(stored)
    ]
