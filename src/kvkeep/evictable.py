"""Which caches of a model can be evicted, and what is refused before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkeep.allocation import Allocation
from kvkeep.attention import (
    FAST,
    SEAM,
    UNKNOWN,
    ModelFacts,
    batch_fault,
    facts_of,
    model_name,
    stand_in_fault,
)
from kvkeep.caches import (
    is_compact,
    is_exact,
    is_plain,
    leaves_of,
    require_evictable,
    require_one_request,
)
from kvkeep.choosing import require_one_count
from kvkeep.errors import BudgetError, ConfigError, UnsupportedModelError
from kvkeep.policies import POLICIES, Policy
from kvkeep.spec import Budget, EvictionConfig

_SEES = frozenset({"queries", "attention", "replay", "draft"})


@dataclass(frozen=True)
class Evictable:
    """What eviction works on in a cache list.

    Attributes:
        layers: indices, among the leaves of the cache list, of what rows are chosen for.
        facts: of the model.
    """

    layers: list[int]
    facts: ModelFacts = UNKNOWN


def full_attention_layers(model: Any, cache: list[Any]) -> list[int]:
    """Indices among the leaves of plain full-attention KV caches, exact or compact.

    Raises:
        UnsupportedModelError: there is none.
        CacheError: a layer is quantised or a batch.
    """
    leaves = leaves_of(cache)
    require_evictable([leaf for leaf in leaves if not is_compact(leaf)])
    layers = [i for i, leaf in enumerate(leaves) if is_plain(leaf) or is_compact(leaf)]
    if not layers:
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise UnsupportedModelError(
            f"model {model_name(model)!r} has no layer with a plain KV cache",
            expected="at least one KVCache layer",
            received=", ".join(kinds) or "no caches",
            remedy="Run it with eviction off: there is nothing to evict.",
        )
    for index in layers:
        if leaves[index].keys is not None:
            require_one_request(leaves[index])
    return layers


def evictable(model: Any, cache: list[Any]) -> Evictable:
    """The layers whose rows can be chosen, by what the model does with them.

    Raises:
        UnsupportedModelError: there is none.
        CacheError: a layer is quantised or a batch.
    """
    layers = full_attention_layers(model, cache)
    facts = facts_of(model)
    chosen = [index for index in layers if facts.of(index).chosen]
    if not chosen:
        reasons = {facts.of(index).fixed for index in layers} - {None}
        raise UnsupportedModelError(
            f"model {model_name(model)!r} {sorted(map(str, reasons))[0]}"
            if reasons
            else f"model {model_name(model)!r} never fills its KV caches",
            expected="a layer that can do without rows",
            received="none",
            remedy="Run it with eviction off.",
        )
    return Evictable(chosen, facts)


def evictable_layers(model: Any, cache: list[Any]) -> list[int]:
    """Indices among the leaves of a cache list of what rows are chosen for.

    Raises:
        As `evictable`.
    """
    return evictable(model, cache).layers


def layers_to_evict(prompt_cache: list[Any], model: Any | None = None) -> list[int]:
    """Indices, among the leaves of a cache list, of filled `KVCache`s that may lose rows.

    Args:
        prompt_cache: mlx-lm's cache list.
        model: what the cache is of; without it every filled `KVCache` counts.

    Raises:
        CacheError: a layer is quantised or a batch (`model` given).
        UnsupportedModelError: `model` can do without rows in none of its layers.
    """
    exact = [i for i, leaf in enumerate(leaves_of(prompt_cache)) if is_exact(leaf)]
    if model is None or not exact:
        return exact
    return [index for index in evictable(model, prompt_cache).layers if index in exact]


def sees_all_from_replay(policy: Policy) -> bool:
    """Whether a policy can score a cache that was filled unobserved: it reads no more of the
    prefill than the last queries."""
    return not {"attention", "replay"} & policy.needs


def query_free_policies() -> list[str]:
    """Names of the policies that need no more than keys and values."""
    return [name for name, policy in POLICIES.items() if policy.needs <= {"keys", "values"}]


def require_possible(
    model: Any,
    found: Evictable,
    config: EvictionConfig,
    policy: Policy,
    allocation: Allocation,
    *,
    batched: bool = False,
) -> None:
    """Refuse a policy, an allocation or a store that a model cannot be evicted with.

    Args:
        batched: the cache will be in a batch.

    Raises:
        UnsupportedModelError: the model's queries cannot be seen, and the policy needs them.
        ConfigError: its layers need one set of rows, or one array, and something else is asked.
    """
    facts = found.facts
    require_queries(model, found, policy, allocation)
    if batched and (fault := batch_fault(model)) is not None:
        raise UnsupportedModelError(
            f"model {model_name(model)!r} cannot decode evicted requests in a batch",
            expected="one mask that fits all its layers",
            received=fault,
            remedy="Run it alone (kvkeep generate), or with eviction off.",
        )
    if facts.one_set:
        require_one_count(allocation)
    uneven = config.store in ("ragged", "union") or allocation.by_head
    stand_ins = uneven and (batched or config.store != "union")
    union = config.store == "union" and facts.masks_of_their_own
    if union or (uneven and facts.heads_alike) or (stand_ins and stand_in_fault(model)):
        raise ConfigError(
            f"model {model_name(model)!r} reads a layer's rows as one array",
            expected="store 'auto', 'shared' or 'per-head', and allocation 'uniform'",
            received=f"store {config.store!r}, allocation {allocation.name!r}",
        )


def require_queries(model: Any, found: Evictable, policy: Policy, allocation: Allocation) -> None:
    """Refuse a policy that needs queries of a model that does not show them.

    Raises:
        UnsupportedModelError: names the policies that would do.
    """
    facts = found.facts
    if not (policy.needs & _SEES or policy.observation_window or allocation.window):
        return
    captured = policy.scope == "model" and not allocation.window
    own = [i for i in found.layers if facts.of(i).route != SEAM]
    unseen = [i for i in own if not (captured and facts.of(i).route == FAST)]
    if unseen:
        reason = (
            f"computes attention on its own in {len(unseen)} of {len(found.layers)} layers, so"
            f" policy {policy.name!r} cannot see its queries"
        )
        _refuse(model, reason, unseen, captures=all(facts.of(i).route == FAST for i in own))
    if "output_weights" in policy.needs:
        mixed = [i for i in found.layers if not facts.of(i).heads_as_they_are]
        if mixed:
            reason = f"scores heads that are not a layer's own, and policy {policy.name!r} goes by"
            _refuse(model, f"{reason} each one's output weights", mixed)
    scored = [i for i in found.layers if facts.of(i).scores_in_mask and not facts.of(i).latent]
    if scored:
        reason = (
            "adds positional scores to its attention through the mask, which policy"
            f" {policy.name!r} would leave out"
        )
        _refuse(model, reason, scored)


def _refuse(model: Any, reason: str, layers: Sequence[int], captures: bool = False) -> None:
    names = ", ".join(query_free_policies())
    other = ", or policy 'snapkv-d'" if captures else ""
    shown = ", ".join(map(str, layers[:6])) + (", …" if len(layers) > 6 else "")
    raise UnsupportedModelError(
        f"model {model_name(model)!r} {reason}",
        expected="attention through mlx_lm.models.base.scaled_dot_product_attention",
        received=f"other attention in layers {shown}",
        remedy=f"Run it with eviction off, or use a policy that needs no queries ({names}){other}.",
    )


def known_rows(budget: Budget, length: int) -> int:
    """Rows that a budget allows where that is known without the cache, else 0."""
    return 0 if budget.unit == "bytes" else budget.rows(length)


def require_room(config: EvictionConfig, length: int) -> None:
    """Refuse a budget below what is protected of `length` positions, where that is known
    before they are computed.

    Raises:
        BudgetError: it is.
    """
    if keep := known_rows(config.limit, length):
        inside = np.zeros(length, dtype=np.bool_)
        for first, stop in config.protect:
            inside[first:stop] = True
        if (protected := int(np.count_nonzero(inside))) > keep:
            raise BudgetError(
                f"a budget of {keep} rows cannot hold {protected} protected positions",
                expected=f"at least {protected} rows per head",
                received=f"{config.limit} of {length} positions",
                remedy="Raise the budget or protect fewer positions.",
            )
