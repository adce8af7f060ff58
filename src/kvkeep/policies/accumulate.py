"""What a policy gathers while a prompt runs by, where the last queries are not enough."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from kvkeep.errors import ConfigError
from kvkeep.spec import LayerView, Rope


@dataclass(frozen=True)
class Replayed:
    """Which part of a prompt is being read again.

    Attributes:
        length: T, rows of the whole prompt; those of the replay come after them.
        start, stop: the part's positions.
    """

    length: int
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk:
    """One attention call of a prefill, for heads that hold equally many rows.

    Attributes:
        queries: [H_q, n, D] post-RoPE.
        keys: [H_kv, t, D] post-RoPE, all rows held; the last n are the queries' own.
        values: [H_kv, t, D_v].
        scale: what q.k is multiplied by before the softmax.
        first: true position of the first query.
        sinks: [H_q] attention-sink logits, or None.
        rope: the layer's rotation, for policies that need it, else None.
        replayed: the part of the prompt that these tokens repeat, or None in the prefill.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float
    first: int
    sinks: mx.array | None = None
    rope: Rope | None = None
    replayed: Replayed | None = None


class Accumulator(ABC):
    """Gathers numbers from the chunks of one prompt, for heads that hold equally many rows.

    It may not depend on where the chunks' borders lie (rounding aside), works in float32
    pieces of `PIECE_BYTES` and evaluates as it goes, so that no chunk is kept alive. In a
    prefill on top of rows that a layer held before, it sees the new tokens' queries alone.
    """

    @abstractmethod
    def add(self, chunk: Chunk) -> None:
        """Take in the next chunk."""

    @abstractmethod
    def finish(self) -> Mapping[str, mx.array]:
        """What `LayerView.seen` will hold; asked for once, after the last chunk."""


def gathered(view: LayerView, name: str) -> mx.array:
    """An array that the policy's accumulator left in the view.

    Raises:
        ConfigError: the view has none of that name.
    """
    if name not in view.seen:
        raise ConfigError(
            "a policy that accumulates during the prefill got nothing",
            expected=f"a LayerView whose `seen` holds {name!r}",
            received=", ".join(view.seen) or "nothing",
        )
    return view.seen[name]
