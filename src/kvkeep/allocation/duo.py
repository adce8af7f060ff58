"""DuoAttention's classes: retrieval heads keep everything, streaming heads keep little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvkeep.allocation.apportion import apportion
from kvkeep.allocation.base import Allocation, Demand
from kvkeep.errors import BudgetError, ConfigError
from kvkeep.spec import HeadProfile


@dataclass(frozen=True)
class Duo(Allocation):
    """Rows by a head profile: streaming heads get sinks + recent, retrieval heads the rest.

    With `retrieval_share` None the heads are served in the order of their profile scores, each
    with every row it holds, until the total is spent; one head in between gets what is left
    over. With a share, that part of all heads is retrieval and divides the rest evenly.

    What a streaming head keeps is still chosen by the policy, which forces sinks and recent
    rows; with policy "sink_recent" it is exactly the paper's streaming head.

    Source: Xiao et al., "DuoAttention", arXiv:2410.10819, sections 2.2 to 2.4.

    Attributes:
        profile: which heads retrieve, and the sinks and recent rows of those that stream.
        retrieval_share: share of all heads that retrieve, or None.

    Raises:
        ConfigError: the share is not between 0 and 1, or there is no profile.
    """

    profile: HeadProfile | None = None
    retrieval_share: float | None = None

    name: ClassVar[str] = "duo"
    by_head: ClassVar[bool] = True
    summary: ClassVar[str] = "retrieval heads keep all rows, streaming heads sinks + recent"
    source: ClassVar[str] = "DuoAttention, arXiv:2410.10819"

    def __post_init__(self) -> None:
        """Refuse options out of range.

        Raises:
            ConfigError: names the option.
        """
        super().__post_init__()
        if self.profile is None:
            raise ConfigError(
                "allocation 'duo' needs a head profile",
                expected="the file that `kvkeep heads profile` wrote for this model",
                received="none",
                remedy="Pass --kv-heads FILE (head_profile=... in Python).",
            )

    @property
    def head_profile(self) -> HeadProfile | None:
        """The profile."""
        return self.profile

    def counts(self, demand: Demand) -> list[np.ndarray]:
        """[H_kv] counts per layer; the sum is keep times all heads.

        Raises:
            ConfigError: the profile lacks a layer, or has another number of heads.
            BudgetError: the total does not hold what is protected.
        """
        scores = np.concatenate([self._of_layer(demand, i) for i in range(len(demand.heads))])
        held = np.concatenate(demand.held)
        assert self.profile is not None  # refused above
        most = max(self.profile.sinks + self.profile.recent, demand.least)
        stream = np.minimum(min(most, demand.keep), held)
        if demand.least > demand.keep:
            raise BudgetError(
                f"a budget of {demand.keep} rows cannot hold {demand.least} protected positions",
                expected=f"at least {demand.least} rows per head",
                received=str(demand.keep),
                remedy="Raise the budget or protect fewer positions.",
            )
        order = np.argsort(-scores, kind="stable")
        if self.retrieval_share is None:
            flat = _served(order, stream, held, demand.total)
        else:
            retrieving = order[: round(self.retrieval_share * len(order))]
            flat = _shared_out(retrieving, stream, held, demand.total)
        return np.split(flat, np.cumsum([len(rows) for rows in demand.held])[:-1])

    def _of_layer(self, demand: Demand, place: int) -> np.ndarray:
        assert self.profile is not None
        layer = demand.layers[place]
        found = self.profile.scores.get(layer)
        if found is None or len(found) != demand.heads[place]:
            raise ConfigError(
                "the head profile does not fit the model",
                expected=f"scores of {demand.heads[place]} KV heads for layer {layer}",
                received="none" if found is None else f"{len(found)}",
                remedy="Make one for this model: kvkeep heads profile --model …",
            )
        return np.asarray(found, np.float64)


def _served(order: np.ndarray, stream: np.ndarray, held: np.ndarray, total: int) -> np.ndarray:
    counts = stream.astype(np.int64)
    left = min(total, int(held.sum())) - int(counts.sum())
    for head in order:
        more = min(int(held[head] - counts[head]), left)
        counts[head] += more
        left -= more
    return counts


def _shared_out(
    retrieving: np.ndarray, stream: np.ndarray, held: np.ndarray, total: int
) -> np.ndarray:
    counts = stream.astype(np.int64)
    rest = np.ones(len(counts), np.bool_)
    rest[retrieving] = False
    total = min(total, int(held.sum()))
    if len(retrieving):
        mine = min(total - int(counts[rest].sum()), int(held[retrieving].sum()))
        ones = np.ones(len(retrieving))
        counts[retrieving] = apportion(ones, mine, counts[retrieving], held[retrieving])
    if rest.any():  # what the retrieval heads cannot hold
        left = total - int(counts[~rest].sum())
        counts[rest] = apportion(np.ones(int(rest.sum())), left, counts[rest], held[rest])
    return counts
