"""What a model does with each of its caches, as far as eviction is concerned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

#: How the rows of a cache reach attention: through the seam, through `mx.fast` by the model's
#: own call, in the model's own arithmetic, not at all (an indexer's keys, which go along with
#: the rows beside them), or not looked at (a cache of another kind).
SEAM, FAST, OWN, ALONG, OTHER = "seam", "fast", "own", "along", "other"


@dataclass(frozen=True)
class LeafFacts:
    """One cache of a model.

    Attributes:
        kind: its class's name, of a fresh cache.
        layer: index in the cache list; a layer may hold several.
        route: SEAM, FAST, OWN, ALONG or OTHER.
        readers: attention calls that read its rows in one forward.
        by_key: readers know the rows by the array that the cache handed out, not by the cache.
        scores_in_mask: attention's mask carries scores; only a model's own mask is right.
        absorb: of latent rows (see `attention.latent`), what absorbs queries, else None.
        head_order: KV head of each head that attention gets, where heads of one KV head do
            not stand together, else None.
        sinks: attention has sinks.
        fixed: why its rows must all stay although it is a plain `KVCache`, or None.
    """

    kind: str
    layer: int
    route: str = OTHER
    readers: int = 0
    by_key: bool = False
    scores_in_mask: bool = False
    absorb: Callable[[mx.array], mx.array] | None = None
    head_order: tuple[int, ...] | None = None
    sinks: bool = False
    fixed: str | None = None

    @property
    def evictable(self) -> bool:
        """Whether rows may leave, chosen or along with others."""
        return self.route != OTHER and self.fixed is None

    @property
    def chosen(self) -> bool:
        """Whether rows are chosen here."""
        return self.evictable and self.route != ALONG

    @property
    def latent(self) -> bool:
        """Whether these are latent rows whose queries can be absorbed."""
        return self.absorb is not None

    @property
    def heads_as_they_are(self) -> bool:
        """Whether the query heads that score are those of the layer, in its order."""
        return not self.latent and self.readers <= 1 and self.head_order is None

    @property
    def one_set(self) -> bool:
        """Whether all layers and heads must keep the same positions.

        One mask, sized by the first cache, then serves all of them.
        """
        return self.chosen and (self.route != SEAM or self.scores_in_mask)


@dataclass(frozen=True)
class ModelFacts:
    """A model's caches, in the order of `leaves_of`.

    Attributes:
        leaves: what is known of each.
        failure: why the model could not be looked at, or None.
    """

    leaves: tuple[LeafFacts, ...] = ()
    failure: str | None = None

    @property
    def one_set(self) -> bool:
        """Whether all layers and heads must keep the same positions."""
        return any(leaf.one_set for leaf in self.leaves)

    @property
    def masks_of_their_own(self) -> bool:
        """Whether a layer that keeps its rows works on the model's mask before attention."""
        return any(leaf.fixed is not None and leaf.route == ALONG for leaf in self.leaves)

    @property
    def heads_alike(self) -> bool:
        """Whether all heads of a layer must keep the same positions."""
        return self.one_set or any(leaf.head_order for leaf in self.leaves if leaf.chosen)

    def of(self, index: int) -> LeafFacts:
        """Facts of a leaf; of a model that could not be looked at, those of a plain one."""
        if index < len(self.leaves):
            return self.leaves[index]
        return LeafFacts("KVCache", index, SEAM, readers=1)


#: Of a model that was not looked at.
UNKNOWN = ModelFacts()
