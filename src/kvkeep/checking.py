"""What eviction does on a model, layer by layer, and what it would save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mlx_lm.models.cache import make_prompt_cache

from kvkeep.allocation import allocation_of
from kvkeep.attention import (
    ALONG,
    LeafFacts,
    ModelFacts,
    facts_of,
    find_parts,
    model_name,
    stand_in_fault,
)
from kvkeep.errors import KvkeepError
from kvkeep.evictable import evictable, require_possible, require_queries
from kvkeep.footprint import Footprint, measure_footprint
from kvkeep.generation import RECOMMENDED
from kvkeep.policies import POLICIES, policy_of
from kvkeep.spec import EvictionConfig

Verdict = Literal["exact", "partly", "refused"]

# What a cache that is no plain one holds, by its class.
_UNTOUCHED = {
    "RotatingKVCache": "a sliding window: bounded already",
    "ChunkedKVCache": "attends inside chunks: bounded already",
    "ArraysCache": "a state, no rows",
}


@dataclass(frozen=True)
class LayerReport:
    """One cache of a model.

    Attributes:
        layer: index in the cache list.
        kind: the cache's class.
        evicted: whether rows leave.
        note: what is particular, or why it stays untouched.
    """

    layer: int
    kind: str
    evicted: bool
    note: str


@dataclass(frozen=True)
class ModelReport:
    """What eviction does on a model.

    Attributes:
        name: the model's type.
        verdict: "exact": rows leave every layer; "partly": some layers stay as they are, by
            design; "refused": nothing is evicted.
        reason: of a refusal, in a line.
        layers: one entry per cache, as `Footprint.layers`.
        policies: names of the policies that can score it.
        stores: names of the stores that it works with.
        footprint: bytes, measured; None where the model does not run here.
        refusal: why the config that was asked for is refused, or None.
    """

    name: str
    verdict: Verdict
    reason: str
    layers: tuple[LayerReport, ...]
    policies: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()
    footprint: Footprint | None = None
    refusal: str | None = None


def check_model(
    model: Any, config: EvictionConfig = RECOMMENDED, *, measure: bool = True
) -> ModelReport:
    """Look at a model: no prompt is read, and nothing of the model's size is computed.

    Args:
        model: an mlx-lm model.
        config: what would be asked of it.
        measure: run two tokens through it for the bytes of its caches.
    """
    facts, name = facts_of(model), model_name(model)
    if facts.failure is not None:
        return ModelReport(name, "refused", f"does not run here ({facts.failure})", ())
    layers = tuple(_layer(leaf) for leaf in facts.leaves)
    footprint = measure_footprint(model) if measure else None
    try:
        found = evictable(model, make_prompt_cache(model))
    except KvkeepError as error:
        kinds = ", ".join(sorted({leaf.kind for leaf in facts.leaves}))
        reason = f"{_last_words(error.problem, name)}: what it holds is {kinds}"
        return ModelReport(name, "refused", reason, layers, footprint=footprint)
    refusal = None
    try:
        require_possible(model, found, config, policy_of(config), allocation_of(config))
    except KvkeepError as error:
        refusal = str(error)
    policies = tuple(name for name in POLICIES if _can_score(model, found, name))
    whole = all(leaf.evicted for leaf in layers)
    return ModelReport(
        name,
        "exact" if whole else "partly",
        "",
        layers,
        policies,
        _stores(model, facts),
        footprint,
        refusal,
    )


def _layer(leaf: LeafFacts) -> LayerReport:
    if not leaf.evictable:
        note = leaf.fixed or _UNTOUCHED.get(leaf.kind, "no rows of full attention")
        return LayerReport(leaf.layer, leaf.kind, False, note)
    notes = []
    if leaf.route == ALONG:
        notes.append("goes along with the rows beside it")
    if leaf.readers > 1:
        notes.append(f"read by {leaf.readers} layers, scored over all")
    if leaf.scores_in_mask:
        notes.append("latent rows")
    if leaf.sinks:
        notes.append("attention sinks")
    if leaf.chosen and leaf.route != "seam":
        notes.append("attention of the model's own")
    return LayerReport(leaf.layer, leaf.kind, True, ", ".join(notes))


def _can_score(model: Any, found: Any, name: str) -> bool:
    config = EvictionConfig(policy=name, budget=RECOMMENDED.budget)
    policy = policy_of(config)
    try:
        require_queries(model, found, policy, allocation_of(config))
        find_parts(model, make_prompt_cache(model), found.layers, policy.needs, name)
    except KvkeepError:
        return False
    return True


def _stores(model: Any, facts: ModelFacts) -> tuple[str, ...]:
    if facts.heads_alike:
        return ("shared",)
    single = ("shared", "per-head", *(() if facts.masks_of_their_own else ("union",)))
    return single if stand_in_fault(model) else (*single, "ragged")


def _last_words(problem: str, name: str) -> str:
    return problem.removeprefix(f"model {name!r} ")
