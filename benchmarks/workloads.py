"""Models, caches and prompts that several benchmarks use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from kvkeep import PositionPreservingKVCache

Store = Literal["shared", "per-head"]


@dataclass(frozen=True)
class Options:
    """How a benchmark is to run.

    Attributes:
        quick: tiny sizes and few rounds: shows that it works, says nothing about speed.
        random: random weights instead of the demo model's.
    """

    quick: bool = False
    random: bool = False


def random_llama(
    *, layers: int, hidden: int, heads: int, kv_heads: int, inter: int, vocab: int
) -> Any:
    """A float32 llama with random weights (the same ones each time), evaluated."""
    mx.random.seed(0)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inter,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5,
        vocab_size=vocab,
        rope_theta=100_000.0,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    model = llama.Model(args)
    mx.eval(model.parameters())
    return model


def tiny_llama(quick: bool) -> Any:
    """A model whose decode step is short, so that what a cache costs in Python shows."""
    if quick:
        return random_llama(layers=2, hidden=32, heads=4, kv_heads=2, inter=64, vocab=64)
    return random_llama(layers=4, hidden=256, heads=8, kv_heads=4, inter=512, vocab=1024)


def prompt_model(options: Options) -> tuple[str, Any]:
    """Name and model of the benchmarks that read a prompt: the demo model or its shape."""
    if options.quick:
        return "tiny random llama", tiny_llama(quick=True)
    if options.random:
        shape = {"layers": 30, "hidden": 576, "heads": 9, "kv_heads": 3, "inter": 1536}
        return "demo model's shape, random weights", random_llama(**shape, vocab=49_152)
    import mlx_lm

    from kvkeep.demo_model import resolve_model

    return "demo model", mlx_lm.load(str(resolve_model("demo")))[0]


def random_prompt(model: Any, length: int) -> list[int]:
    """Token ids drawn at random: what they say changes no time and no byte here."""
    return np.random.default_rng(0).integers(0, model.args.vocab_size, length).tolist()


def random_rows(heads: int, rows: int, dim: int) -> tuple[mx.array, mx.array]:
    """Keys and values [1, heads, rows, dim] float32, evaluated."""
    keys = mx.random.normal((1, heads, rows, dim))
    values = mx.random.normal((1, heads, rows, dim))
    mx.eval(keys, values)
    return keys, values


def row_shape(model: Any) -> tuple[int, int]:
    """KV heads and head dimension of a llama."""
    args = model.args
    return args.num_key_value_heads, args.hidden_size // args.num_attention_heads


def stock_cache(keys: mx.array, values: mx.array) -> KVCache:
    """mlx-lm's cache of these rows, as a prefill of so many tokens leaves it."""
    cache = KVCache()
    cache.keys, cache.values, cache.offset = keys, values, keys.shape[2]
    return cache


def compact_cache(
    keys: mx.array, values: mx.array, offset: int, store: Store
) -> PositionPreservingKVCache:
    """The same rows as what is left of `offset` positions, drawn at random."""
    draw = np.random.default_rng(0)
    heads, rows = keys.shape[1:3]
    sets = [np.sort(draw.choice(offset, rows, replace=False)) for _ in range(heads)]
    positions = sets[0] if store == "shared" else sets
    return PositionPreservingKVCache(keys, values, offset=offset, positions=positions)
