"""What an allocation is: a rule that deals a total of rows out to layers and heads."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from kvkeep.spec import EvictionConfig, HeadProfile, LayerView


@dataclass(frozen=True)
class Scored:
    """Scores of one layer, one array per set of positions (a head, or all heads together).

    Attributes:
        scores: S arrays [R_s] float32, higher = keep.
        forced: S bool arrays [R_s]: rows that stay whatever they score.
    """

    scores: tuple[np.ndarray, ...]
    forced: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Demand:
    """What is to be dealt out, over the evictable layers in cache order.

    Attributes:
        keep: mean rows per KV head.
        heads: H_kv of each layer.
        held: for each layer the rows [S] that its sets hold now: S is H_kv, or 1 where one
            set serves all heads.
        protected: rows that every set keeps at least.
        recent: last rows that stay.
        layers: indices in the cache list.
        scored: scores of each layer, for rules that look at them.
        preferences: `Allocation.preference` of each layer, for rules that have one.
        part: the part of a row, in [0, 1), that a share of the prompt allows beyond `keep`.
    """

    keep: int
    heads: tuple[int, ...]
    held: tuple[np.ndarray, ...]
    protected: int = 0
    recent: int = 0
    layers: tuple[int, ...] = ()
    scored: Sequence[Scored] = ()
    preferences: Sequence[float] = ()
    part: float = 0.0

    @property
    def total(self) -> int:
        """Rows times heads that may stay in all layers together."""
        return self.keep * sum(self.heads)

    @property
    def least(self) -> int:
        """Rows that every set keeps at least."""
        return max(self.protected, 1)


#: What a rule must have seen before it can count: nothing, one layer's scores, or all layers'.
Sight = Literal["nothing", "layer", "model"]


@dataclass(frozen=True)
class Allocation(ABC):
    """Deals rows out; frozen, and free of any state of a request.

    Subclasses are frozen dataclasses whose fields are options, named as in `EvictionConfig`.

    Attributes:
        name: what flags and requests call it.
        sight: what it must have seen before it can count.
        by_head: whether heads of one layer may get unequal counts.
        window: W, last queries that `preference` looks at; 0: none.
        summary: the rule in one line.
        source: paper, code or pull request that it comes from, in a few words.
    """

    name: ClassVar[str]
    sight: ClassVar[Sight] = "nothing"
    by_head: ClassVar[bool] = False
    window: ClassVar[int] = 0
    summary: ClassVar[str]
    source: ClassVar[str]

    def __post_init__(self) -> None:
        """Refuse options out of range.

        Raises:
            ConfigError: names the option.
        """
        shared = {field.name for field in dataclasses.fields(EvictionConfig)}
        options: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name in shared
        }
        EvictionConfig.parse(options)

    @property
    def head_profile(self) -> HeadProfile | None:
        """The head profile that it reads, which must be of the model."""
        return None

    def preference(self, view: LayerView) -> float:
        """How much of the total this layer asks for, relative to the others."""
        return 1.0

    @abstractmethod
    def counts(self, demand: Demand) -> list[np.ndarray]:
        """Rows [S] that each layer's sets keep; a set's count never exceeds what it holds.

        The sum over sets, times the heads that each of them serves, is `demand.total`, or all
        that is held where that is less. Where layers have different numbers of heads and
        their sets equal counts, it may fall short by less than one row of the widest layer.

        Raises:
            BudgetError: the total does not hold what is protected.
        """
