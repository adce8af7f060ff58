"""What a policy is: a name, what it needs, and a pure score."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import mlx.core as mx

from kvkeep.policies.accumulate import Accumulator
from kvkeep.spec import EvictionConfig, LayerView

# "attention" is every query of the prefill and "replay" every query of a second reading of
# the prompt: either feeds the policy's accumulator. "draft" is what the model would say next.
Need = Literal[
    "queries", "keys", "values", "attention", "rope", "output_weights", "replay", "draft"
]
Scope = Literal["model", "head"]


@dataclass(frozen=True)
class Policy(ABC):
    """Scores the rows of a layer; frozen, and free of any state of a request.

    Subclasses are frozen dataclasses whose fields are options, named as in `EvictionConfig`.

    Attributes:
        name: what flags and requests call it.
        needs: the parts of a `LayerView` that it reads; nothing else is computed for it.
            The shape of `keys` is always there.
        scope: "head" scores stand for themselves; "model" scores are contributions that
            are summed over all heads and layers into one set of rows.
        query_aware: whether the scores depend on the prompt's last queries: rows that fit one
            question may be the wrong ones for the next.
        budget_aware: whether the scores depend on how many rows may stay.
        summary: the formula in one line.
        source: paper, code or pull request that it comes from, in a few words.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]]
    scope: ClassVar[Scope]
    query_aware: ClassVar[bool]
    budget_aware: ClassVar[bool] = False
    summary: ClassVar[str]
    source: ClassVar[str]

    def __post_init__(self) -> None:
        """Refuse options out of range.

        Raises:
            ConfigError: names the option.
        """
        options = dataclasses.fields(self)
        check_options(**{field.name: getattr(self, field.name) for field in options})

    @property
    def observation_window(self) -> int:
        """W, the last queries that must be observed; 0: none are needed."""
        return 0

    @property
    def draft_length(self) -> int:
        """Tokens of an answer that are drafted before rows are scored; 0: none are needed."""
        return 0

    def default_recent(self, budget: int) -> int:
        """Recent rows kept in a budget of so many rows where the caller names no number.

        An eighth of the budget: most scores alone would evict the end of the question.
        """
        return max(1, budget // 8)

    def accumulator(self) -> Accumulator | None:
        """A new accumulator for some heads of one layer of one prompt; None: none is needed."""
        return None

    @abstractmethod
    def score(self, view: LayerView) -> mx.array:
        """Scores [H_kv, T] float32, finite, higher = keep."""


class WindowPolicy(Policy):
    """A policy that looks at the last `window` queries, whose rows always stay.

    Attributes:
        window: W, the last prompt queries that score.
    """

    window: int  # declared here, a field in each subclass: the order of options is theirs

    @property
    def observation_window(self) -> int:
        """W."""
        return self.window

    def default_recent(self, budget: int) -> int:
        """The window."""
        return self.window


def check_options(**options: Any) -> None:
    """Hold a policy's options to the ranges that an `EvictionConfig` gives those names.

    Raises:
        ConfigError: an option is out of range.
    """
    EvictionConfig.parse(options)
