"""From a prefilled cache to a compact one: view, score, allocate, select, store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from kvkeep.allocation import Allocation, allocation_of
from kvkeep.attention import (
    ALONG,
    DraftStart,
    Observation,
    ProgressCallback,
    RepeatPrompt,
    drafted,
    facts_of,
    find_parts,
    model_name,
    observed_reading,
    replay_queries,
    require_profile_of,
    require_repeatable,
    unchanged_on_error,
)
from kvkeep.caches import (
    bytes_per_row,
    is_compact,
    is_exact,
    is_plain,
    leaves_of,
    live_nbytes,
    replace_leaves,
    request_seam,
    require_evictable,
    require_one_request,
    retained,
    with_siblings,
)
from kvkeep.choosing import Chooser, require_choosable, require_compatible
from kvkeep.errors import CacheError, ConfigError, PromptError, SelectionError
from kvkeep.evictable import (
    Evictable,
    evictable,
    full_attention_layers,
    known_rows,
    layers_to_evict,
    require_possible,
    require_room,
    sees_all_from_replay,
)
from kvkeep.policies import Policy, policy_of
from kvkeep.spec import (
    Budget,
    CompactionTimes,
    EvictionConfig,
    LayerSelection,
    Selection,
    SnapKVEvictionResult,
    checked_positions,
)


def evict_prompt_cache(
    prompt_cache: list[Any],
    keep_indices: Sequence[int] | np.ndarray | mx.array,
    *,
    true_offset: int,
    model: Any | None = None,
) -> SnapKVEvictionResult:
    """Evict every full-attention layer down to one set of positions.

    Args:
        prompt_cache: mlx-lm's cache list; stays untouched. Layers other than a filled
            `KVCache` (sliding window, state space, …) are passed through; with none of
            them evictable this is a no-op.
        keep_indices: ascending, unique positions to keep.
        true_offset: the next position; must be each evicted layer's offset.
        model: what the cache is of. A few model types (docs/models.md) count the rows of some
            layers for positions; given their model, such layers are passed through as well.

    Raises:
        SelectionError: indices are unsorted, repeated, negative or too large.
        CacheError: a layer is quantised, compact or a batch, or has another offset.
        UnsupportedModelError: `model` can do without rows in none of its layers.
    """
    kept = LayerSelection((checked_positions(keep_indices),))
    layers = layers_to_evict(prompt_cache, model)
    return evict_selection(prompt_cache, Selection(true_offset, dict.fromkeys(layers, kept)))


def evict_selection(
    prompt_cache: list[Any],
    selection: Selection,
    store: str = "auto",
    *,
    query_heads: int | None = None,
    model: Any | None = None,
) -> SnapKVEvictionResult:
    """Store a selection: the kept positions of each layer and head, the rest evicted.

    Args:
        prompt_cache: mlx-lm's cache list; stays untouched.
        selection: from exact layers of `selection.source_length` positions.
        store: "auto" (ragged where heads keep unequal numbers), "shared" or "per-head"
            (equal numbers), "ragged" or "union".
        query_heads: H_q, which union caches note for their `make_mask`.
        model: what the cache is of; given, layers that must keep their rows are refused.

    Raises:
        SelectionError: the selection names a layer that is not a filled `KVCache`, or that
            `model` cannot do without rows in.
        CacheError: a layer is quantised, compact or a batch, has another offset than
            `source_length`, or its heads keep unequal numbers in a store of equal ones.
        ConfigError: there is no such store.
    """
    leaves = leaves_of(prompt_cache)
    require_evictable(leaves)
    for index in selection.layers:
        if not 0 <= index < len(leaves) or not is_exact(leaves[index]):
            raise SelectionError(
                f"layer {index} cannot be evicted",
                expected="indices of filled KVCache layers",
                received=index,
            )
        require_one_request(leaves[index])
        _require_offset(leaves[index].offset, selection.source_length, index)
        if model is not None and (fixed := facts_of(model).of(index).fixed) is not None:
            raise SelectionError(
                f"layer {index} must keep its rows: model {model_name(model)!r} {fixed}",
                expected=f"layers {layers_to_evict(prompt_cache, model)}",
                received=index,
            )
    before, cache = cache_nbytes(prompt_cache), list(prompt_cache)
    chosen = with_siblings(prompt_cache, selection.layers)
    stored = {
        i: retained(leaves[i], kept, store, query_heads=query_heads) for i, kept in chosen.items()
    }
    replace_leaves(cache, stored)
    return _result(cache, selection, before)


def compact_prompt_cache(
    model: Any,
    prompt: Sequence[int] | mx.array,
    *,
    budget: Budget | int | float | str | None = None,
    window: int = 24,
    sink_tokens: int = 4,
    recent_tokens: int | None = None,
    min_tokens: int = 128,
    score_chunk_size: int = 8,
    config: EvictionConfig | None = None,
    prefill_step_size: int = 2048,
    progress: ProgressCallback | None = None,
) -> SnapKVEvictionResult:
    """Prefill a prompt in chunks and evict its cache: SnapKV-D unless `config` says else.

    Each layer's exact rows are let go as soon as its compact ones exist, so at most one
    layer exists twice. A prompt of at most `min_tokens` tokens or rows is kept whole, in
    stock caches.

    Args:
        model: an mlx-lm model.
        prompt: T token ids, at least 1.
        budget: what may stay; needed unless `config` is given, whose budget it replaces.
        window, sink_tokens, recent_tokens, min_tokens, score_chunk_size: as in
            `EvictionConfig`; not looked at when `config` is given.
        prefill_step_size: tokens per chunk.
        progress: called with (done, total) tokens.

    Returns:
        The result; its cache decodes on from position T (`true_offset`).

    Raises:
        PromptError, ConfigError, UnsupportedModelError.
    """
    if config is None:
        config = EvictionConfig(
            budget=Budget.parse(budget),  # type: ignore[arg-type]  # None is refused there
            window=window,
            sink_tokens=sink_tokens,
            recent_tokens=recent_tokens,
            min_tokens=min_tokens,
            score_chunk_size=score_chunk_size,
        )
    elif budget is not None:
        config = replace(config, budget=Budget.parse(budget))
    return prefill_and_compact(
        model,
        checked_prompt(prompt),
        make_prompt_cache(model),
        config,
        step=prefill_step_size,
        progress=progress,
    )


def prefill_and_compact(
    model: Any,
    tokens: Sequence[int],
    cache: list[Any],
    config: EvictionConfig,
    *,
    step: int = 2048,
    progress: ProgressCallback | None = None,
    keep_exact: bool = False,
    repeat_prompt: RepeatPrompt | None = None,
    draft_start: DraftStart | None = None,
) -> SnapKVEvictionResult:
    """Append tokens to a cache (empty, exact or compact) and compact it to the budget.

    Args:
        tokens: token ids to append, at least 1.
        cache: mlx-lm's cache list, filled by this call. Its evictable layers' rows are
            let go one by one, unless `keep_exact`.
        keep_exact: leave `cache` as it is after the prefill.
        repeat_prompt: instructions for policies that read the prompt a second time ("kvzip");
            without them its tokens alone are repeated.
        draft_start: where policies that draft an answer ("lookahead") begin; without it after
            the last of `tokens`.

    Raises:
        ConfigError, HeadProfileError, UnsupportedModelError: before anything was computed,
            where that can be known; whatever is raised, the layers of `cache` hold what they
            held before.
    """
    policy, allocation = policy_of(config), allocation_of(config)
    require_compatible(config, policy, allocation)
    if allocation.head_profile is not None:
        require_profile_of(allocation.head_profile, model)
    leaves = leaves_of(cache)
    found = Evictable(full_attention_layers(model, cache))
    length = len(tokens) + leaves[found.layers[0]].offset
    rows = len(tokens) + leaves[found.layers[0]].size()
    whole = length <= config.min_tokens or rows <= known_rows(config.limit, length)
    if not whole:
        found = evictable(model, cache)
        require_possible(model, found, config, policy, allocation)
        require_choosable(leaves, found.layers, config, policy, one_set=found.facts.one_set)
        if "replay" in policy.needs:
            require_repeatable(cache, found.layers, policy.name)
        if all(is_plain(leaves[i]) for i in found.layers):
            require_room(config, length)
    layers = found.layers
    start = time.perf_counter()
    with unchanged_on_error(leaves):
        seen, prefill = observed_reading(
            model,
            tokens,
            cache,
            [] if whole else layers,  # nothing is asked of a model that keeps every row
            policy,
            window=0 if whole else max(policy.observation_window, allocation.window),
            repeat_prompt=repeat_prompt,
            draft_start=draft_start,
            score_chunk_size=config.score_chunk_size,
            step=step,
            progress=progress,
        )
        selection = choose_observed(cache, layers, seen, config, policy, allocation)
        score = time.perf_counter() - start - prefill
    del leaves  # nothing but the cache list may hold a layer's exact rows now
    result = store_selection(list(cache) if keep_exact else cache, selection, config.store)
    return replace(result, times=replace(result.times, prefill=prefill, score=score))


def compact_prefilled(
    model: Any,
    tokens: Sequence[int],
    cache: list[Any],
    config: EvictionConfig,
    *,
    draft_start: DraftStart | None = None,
) -> SnapKVEvictionResult:
    """Compact a cache that was filled without observation, as by mlx-lm's batch generator.

    The last W tokens run a second time for their queries (see `replay_queries`).

    Args:
        tokens: the T token ids that the cache holds.
        cache: one request's cache list; stays as it is.
        draft_start: as in `prefill_and_compact`.

    Raises:
        ConfigError: the policy looks at more of the prefill than its last queries, or its
            budget does not hold what is protected.
        CacheError, UnsupportedModelError: a layer cannot be trimmed, or the model's queries
            cannot be seen.
    """
    policy, allocation = policy_of(config), allocation_of(config)
    require_compatible(config, policy, allocation)
    if not sees_all_from_replay(policy):
        raise ConfigError(
            f"policy {policy.name!r} must see the whole prefill",
            expected="a policy that scores by the prompt's last queries, or by its rows alone",
            received=policy.name,
        )
    if allocation.head_profile is not None:
        require_profile_of(allocation.head_profile, model)
    leaves = leaves_of(cache)
    first = leaves[full_attention_layers(model, cache)[0]]
    length, rows = first.offset, first.size()
    if length <= config.min_tokens or rows <= known_rows(config.limit, length):
        return kept_as_it_is(cache, length)
    found = evictable(model, cache)
    layers, facts = found.layers, found.facts
    require_possible(model, found, config, policy, allocation, batched=True)
    require_choosable(leaves, layers, config, policy, one_set=facts.one_set)
    start = time.perf_counter()
    parts = find_parts(model, cache, layers, policy.needs, policy.name)
    window = max(policy.observation_window, allocation.window)
    seen = Observation({}, parts=parts, facts=facts)
    if window or facts.failure:  # one token tells whether the seam sees an unknown model
        last = tokens[-max(window, 1) :]
        observers = replay_queries(
            model, cache, last, layers, policy=policy.name, needed=window > 0
        )
        seen = replace(seen, observers=observers)
    if policy.draft_length:
        seen = drafted(model, tokens, cache, layers, policy, seen, draft_start or DraftStart())
    selection = choose_observed(cache, layers, seen, config, policy, allocation)
    score = time.perf_counter() - start
    result = store_selection(list(cache), selection, config.store)
    return replace(result, times=replace(result.times, score=score))


def kept_as_it_is(cache: list[Any], length: int) -> SnapKVEvictionResult:
    """The result of evicting nothing from a cache, exact or compact, of `length` positions."""
    return _result(list(cache), Selection(length, {}), cache_nbytes(cache))


def choose_observed(
    cache: list[Any],
    layers: list[int],
    seen: Observation,
    config: EvictionConfig,
    policy: Policy,
    allocation: Allocation,
) -> Selection:
    """Score and select; no layer in it where nothing is to be evicted. No cache is changed.

    Raises:
        As `chooser_of`, and SelectionError: scores are not finite.
    """
    chooser = chooser_of(cache, layers, seen, config, policy, allocation)
    kept = {} if chooser.keeps_all(cache, layers) else chooser.choose(cache, layers)
    return Selection(leaves_of(cache)[layers[0]].offset, kept)


def chooser_of(
    cache: list[Any],
    layers: list[int],
    seen: Observation,
    config: EvictionConfig,
    policy: Policy,
    allocation: Allocation,
) -> Chooser:
    """What scores and selects rows of a prefilled cache for a config's budget.

    Raises:
        BudgetError: the budget holds no row, or fewer than are protected.
        CacheError: a layer holds a batch or is at another position.
    """
    leaves = leaves_of(cache)
    offset = leaves[layers[0]].offset
    for index in layers:
        _require_offset(leaves[index].offset, offset, index)
        require_one_request(leaves[index])
    limit = config.limit
    # Rows that go along take their share of each row's bytes.
    along = [i for i, leaf in enumerate(seen.facts.leaves) if leaf.route == ALONG]
    fixed = cache_nbytes(cache) - sum(live_nbytes(leaves[i]) for i in (*layers, *along))
    row = sum(bytes_per_row(leaves[i]) for i in (*layers, *along))
    keep = limit.rows(offset, bytes_per_row=row, fixed_bytes=fixed)
    most = int(limit.amount) - fixed if limit.unit == "bytes" else None
    part = limit.part_of_row(offset)
    return Chooser(config, policy, allocation, keep, len(layers), seen, most, part)


def store_selection(
    cache: list[Any], selection: Selection, store: str = "auto"
) -> SnapKVEvictionResult:
    """Replace the entries of `cache` by compact ones, layer by layer (see `retained`)."""
    before = cache_nbytes(cache)
    start = time.perf_counter()
    leaves = leaves_of(cache)
    for index, kept in with_siblings(cache, selection.layers).items():
        replace_leaves(cache, {index: retained(leaves[index], kept, store)})
        leaves[index] = None  # its exact rows can go
    times = CompactionTimes(compact=time.perf_counter() - start)
    return replace(_result(cache, selection, before), times=times)


def cache_nbytes(cache: list[Any]) -> int:
    """Bytes of the live rows of a cache list, measured on the arrays."""
    return sum(live_nbytes(leaf) for leaf in leaves_of(cache))


def _require_offset(offset: int, expected: int, index: int) -> None:
    if offset != expected:
        raise CacheError(
            f"layer {index} is at another position",
            expected=f"offset {expected}",
            received=f"offset {offset}",
        )


def _result(cache: list[Any], selection: Selection, before: int) -> SnapKVEvictionResult:
    leaves = leaves_of(cache)
    counts = [count for leaf in leaves if is_compact(leaf) for count in leaf.live_head_rows]
    if len({leaf.size() for leaf in leaves if is_plain(leaf) or is_compact(leaf)}) > 1:
        request_seam()  # a mask array that the model sizes by one layer fits no other
    length = selection.source_length
    retained_tokens = round(sum(counts) / len(counts)) if counts else length
    return SnapKVEvictionResult(
        cache=cache,
        evicted=bool(counts) and min(counts) < length,
        true_offset=length,
        retained_tokens=retained_tokens,
        original_tokens=length,
        kv_layers=len(selection.layers),
        compact_cache_nbytes=cache_nbytes(cache),
        exact_cache_nbytes=before,
    )


def checked_prompt(prompt: Any) -> list[int]:
    """A prompt as a list of T >= 1 token ids.

    Raises:
        PromptError: it is empty, nested, or holds something else than token ids.
    """
    expected = "a flat sequence of at least one token id"
    try:
        array = np.asarray(prompt)
    except (TypeError, ValueError):
        raise PromptError("unreadable prompt", expected=expected, received="nested lists") from None
    if array.size == 0:
        raise PromptError("empty prompt", expected=expected, received="no tokens")
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0:
        received = f"{array.ndim} dimensions of {array.dtype}"
        raise PromptError("unreadable prompt", expected=expected, received=received)
    return array.tolist()
