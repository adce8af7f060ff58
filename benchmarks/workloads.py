"""Models, caches and prompts that several benchmarks use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from kvkeep import PositionPreservingKVCache
from kvkeep.bench import SyntheticShape, random_tokens

Store = Literal["shared", "per-head"]
DEMO_SHAPE = SyntheticShape(30, heads=9, kv_heads=3, dim=64, hidden=576, mlp=1536, vocab=49_152)


@dataclass(frozen=True)
class Options:
    """How a benchmark is to run.

    Attributes:
        quick: tiny sizes and few rounds: shows that it works, says nothing about speed.
        random: random weights instead of the demo model's.
    """

    quick: bool = False
    random: bool = False


def tiny_llama(quick: bool) -> Any:
    """A model whose decode step is short, so that what a cache costs in Python shows."""
    shape = SyntheticShape(4, heads=8, kv_heads=4, dim=32, hidden=256, mlp=512, vocab=1024)
    if quick:
        shape = SyntheticShape(2, heads=4, kv_heads=2, dim=8, hidden=32, mlp=64, vocab=64)
    return shape.build()


def prompt_model(options: Options) -> tuple[str, Any]:
    """Name and model of the benchmarks that read a prompt: the demo model or its shape."""
    if options.quick:
        return "tiny random llama", tiny_llama(quick=True)
    if options.random:
        return "demo model's shape, random weights", DEMO_SHAPE.build()
    import mlx_lm

    from kvkeep.demo_model import resolve_model

    return "demo model", mlx_lm.load(str(resolve_model("demo")))[0]


def random_prompt(model: Any, length: int) -> list[int]:
    """Token ids drawn at random: what they say changes no time and no byte here."""
    return random_tokens(model.args.vocab_size, length)


def row_shape(model: Any) -> tuple[int, int]:
    """KV heads and head dimension of a llama."""
    args = model.args
    return args.num_key_value_heads, args.head_dim or args.hidden_size // args.num_attention_heads


def compact_cache(
    keys: mx.array, values: mx.array, offset: int, store: Store
) -> PositionPreservingKVCache:
    """The same rows as what is left of `offset` positions, drawn at random."""
    draw = np.random.default_rng(0)
    heads, rows = keys.shape[1:3]
    sets = [np.sort(draw.choice(offset, rows, replace=False)) for _ in range(heads)]
    positions = sets[0] if store == "shared" else sets
    return PositionPreservingKVCache(keys, values, offset=offset, positions=positions)
