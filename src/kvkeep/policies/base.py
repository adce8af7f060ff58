"""What a policy is: a name, what it needs, and a pure score."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol

import mlx.core as mx

from kvkeep.spec import EvictionConfig, LayerView

Need = Literal["queries", "keys", "values"]
Scope = Literal["model", "head"]


class Policy(Protocol):
    """Scores the rows of a layer; frozen, and free of any state of a request.

    Attributes:
        name: what flags and requests call it.
        needs: the parts of a `LayerView` that it reads; nothing else is computed for it.
            The shape of `keys` is always there.
        scope: "head" scores stand for themselves; "model" scores are contributions that
            are summed over all heads and layers into one set of rows.
        query_aware: whether the scores depend on the prompt's last queries: rows that fit one
            question may be the wrong ones for the next.
        summary: the formula in one line.
        source: paper, code or pull request that it comes from, in a few words.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]]
    scope: ClassVar[Scope]
    query_aware: ClassVar[bool]
    summary: ClassVar[str]
    source: ClassVar[str]

    @property
    def observation_window(self) -> int:
        """W, the last queries that must be observed (0: none)."""
        ...

    def default_recent(self, budget: int) -> int:
        """Recent rows kept in a budget of so many rows where the caller names no number."""
        ...

    def score(self, view: LayerView) -> mx.array:
        """Scores [H_kv, T] float32, finite, higher = keep."""
        ...


def check_options(**options: Any) -> None:
    """Hold a policy's options to the ranges that an `EvictionConfig` gives those names.

    Raises:
        ConfigError: an option is out of range.
    """
    EvictionConfig.parse(options)
