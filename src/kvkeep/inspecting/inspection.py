"""What was found out about one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvkeep.inspecting.layers import require_shown
from kvkeep.inspecting.units import TextUnit
from kvkeep.spec import Budget, EvictionConfig, Selection


@dataclass(frozen=True)
class InspectedLayer:
    """One evictable layer.

    Attributes:
        index: in the cache list.
        heads: H_kv.
        scores: float32 [S, T], higher = keep; S is H_kv, or 1 where one set serves all heads.
    """

    index: int
    heads: int
    scores: np.ndarray

    @property
    def sets(self) -> int:
        """S, sets of positions that the layer keeps."""
        return len(self.scores)


@dataclass(frozen=True)
class Rung:
    """What stays at one budget.

    Attributes:
        budget: as asked.
        selection: the library's own choice; a layer that is not in it keeps every row.
        rows: kept rows per KV head, the mean over heads and layers.
        nbytes: bytes of the whole cache's live rows once stored.
    """

    budget: Budget
    selection: Selection
    rows: float
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """What an eviction keeps of one prompt, at several budgets.

    The prompt's last token is read after the eviction, as in `kvkeep.generate`: it is among
    the tokens, has no score, and always stays.

    Attributes:
        name: what the model is called.
        config: the eviction that was asked for.
        tokens: int64 [T + 1] token ids.
        units: the tokens' text; their tokens add up to T + 1.
        layers: the evictable layers.
        rungs: the budgets, from the fewest rows to the most; that of `config` is among them.
        asked: index of the rung of `config`.
        exact_nbytes: bytes of the whole cache before eviction.
        other_layers: layers that are never evicted (sliding windows, states).
        prefill_seconds, score_seconds: what reading and scoring took.
    """

    name: str
    config: EvictionConfig
    tokens: np.ndarray
    units: tuple[TextUnit, ...]
    layers: tuple[InspectedLayer, ...]
    rungs: tuple[Rung, ...]
    asked: int
    exact_nbytes: int
    other_layers: int
    prefill_seconds: float
    score_seconds: float

    @property
    def positions(self) -> int:
        """T, the positions that were scored."""
        return len(self.tokens) - 1

    @property
    def kept_whole(self) -> bool:
        """Whether the asked eviction keeps every row."""
        return not self.rungs[self.asked].selection.layers

    def kept(self, layer: int, rung: int | None = None) -> np.ndarray:
        """Which positions the sets of a layer keep: bool [S, T].

        Args:
            layer: index among `layers`.
            rung: index among `rungs`; None is the asked one.
        """
        shown = self.layers[layer]
        selection = self.rungs[self.asked if rung is None else rung].selection
        chosen = selection.layers.get(shown.index)
        if chosen is None:
            return np.ones((shown.sets, self.positions), np.bool_)
        kept = np.zeros((shown.sets, self.positions), np.bool_)
        for at in range(shown.sets):
            kept[at, chosen.of_head(at)] = True
        return kept

    def shown(self, indices: Sequence[int] | None) -> list[int]:
        """Positions among `layers` of layers named by their index in the cache list.

        Raises:
            ConfigError: one of them is not an evictable layer.
        """
        there = {layer.index: at for at, layer in enumerate(self.layers)}
        if indices is None:
            return list(there.values())
        require_shown(indices, list(there))
        return sorted({there[index] for index in indices})
