"""What is measured: a real model over prose, or a random one over random rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from kvkeep.bench.machine import ModelFacts
from kvkeep.caches import is_plain
from kvkeep.errors import ConfigError
from kvkeep.haystack import library_prose
from kvkeep.spec import checked_count

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Workload:
    """A model and its prompts.

    Attributes:
        model: as mlx-lm loads it.
        facts: which one it is.
        prompt: T -> T token ids, the same ones each time.
        synthetic: whether caches are filled with random rows instead of by a prefill.
    """

    model: Any
    facts: ModelFacts
    prompt: Callable[[int], list[int]]
    synthetic: bool = False

    @classmethod
    def real(cls, model: Any, tokenizer: Any, name: str, seed: int = 0) -> Workload:
        """A loaded model over prose of the Python library, cut to the length."""
        facts = ModelFacts.of(model, name)
        return cls(model, facts, lambda length: prose_tokens(tokenizer, length, seed))

    @classmethod
    def random(cls, shape: SyntheticShape, dtype: str = "float32", seed: int = 0) -> Workload:
        """A random llama over random rows."""
        model = shape.build(dtype, seed)
        facts = ModelFacts.of(model, "synthetic llama", str(shape))
        return cls(model, facts, lambda length: random_tokens(shape.vocab, length, seed), True)


@dataclass(frozen=True)
class SyntheticShape:
    """Sizes of a random llama.

    Its weights are what a step costs whatever the cache holds: give a model's own sizes to
    see its ratios.

    Attributes:
        layers, heads, kv_heads, dim: L, H_q, H_kv, D.
        hidden: width of the model.
        mlp: width inside its MLPs; 0 becomes 3 × hidden.
        vocab: tokens it knows.

    Raises:
        ConfigError: a size is no whole number >= 1, KV heads do not divide the heads, or D
            is odd.
    """

    layers: int = 4
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    hidden: int = 1024
    mlp: int = 0
    vocab: int = 1024

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least = 0 if field.name == "mlp" else 1
            checked_count(f"synthetic {field.name}", getattr(self, field.name), least)
        if self.heads % self.kv_heads:
            raise ConfigError(
                "synthetic KV heads do not divide the query heads",
                expected=f"kv_heads that divide {self.heads}",
                received=self.kv_heads,
            )
        if self.dim % 2:
            raise ConfigError(
                "synthetic dim is odd",
                expected="an even size, since rotation pairs channels up",
                received=self.dim,
            )
        if not self.mlp:
            object.__setattr__(self, "mlp", 3 * self.hidden)

    @classmethod
    def parse(cls, text: str) -> SyntheticShape:
        """Read sizes such as "layers=4,heads=32,kv_heads=8,dim=128"; others stay as they are.

        Raises:
            ConfigError: a name is unknown, given twice, or its value is no whole number.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        expected = f"name=number pairs of {', '.join(known)}"
        sizes: dict[str, int] = {}
        for pair in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = pair.partition("=")
            name = name.strip().replace("-", "_")
            if name not in known or name in sizes or not value.strip().isdecimal():
                raise ConfigError("unreadable synthetic model", expected=expected, received=pair)
            sizes[name] = int(value)
        return cls(**sizes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in dataclasses.asdict(self).items())

    def build(self, dtype: str = "float32", seed: int = 0) -> llama.Model:
        """The model with random weights, the same ones for a seed, evaluated.

        Raises:
            ConfigError: no such dtype.
        """
        if dtype not in DTYPES:
            raise ConfigError("unknown dtype", expected=", ".join(DTYPES), received=dtype)
        mx.random.seed(seed)
        model = llama.Model(
            llama.ModelArgs(
                model_type="llama",
                hidden_size=self.hidden,
                num_hidden_layers=self.layers,
                intermediate_size=self.mlp,
                num_attention_heads=self.heads,
                num_key_value_heads=self.kv_heads,
                head_dim=self.dim,
                rms_norm_eps=1e-5,
                vocab_size=self.vocab,
                rope_theta=100_000.0,
                tie_word_embeddings=True,
            )
        )
        model.set_dtype(getattr(mx, dtype))
        mx.eval(model.parameters())
        return model


def random_rows(
    heads: int, rows: int, dim: int, dtype: mx.Dtype = mx.float32
) -> tuple[mx.array, mx.array]:
    """Keys and values [1, heads, rows, dim] drawn from MLX's random state, evaluated."""
    keys = mx.random.normal((1, heads, rows, dim), dtype)
    values = mx.random.normal((1, heads, rows, dim), dtype)
    mx.eval(keys, values)
    return keys, values


def stock_cache(keys: mx.array, values: mx.array) -> KVCache:
    """mlx-lm's cache of these rows [1, H_kv, R, D], as a prefill of R tokens leaves it."""
    cache = KVCache()
    cache.keys, cache.values, cache.offset = keys, values, keys.shape[2]
    return cache


def random_cache(shape: SyntheticShape, length: int, dtype: str, seed: int = 0) -> list[KVCache]:
    """A cache list of `length` random rows per layer, the same ones for a seed."""
    mx.random.seed(seed)
    kind = getattr(mx, dtype)
    return [
        stock_cache(*random_rows(shape.kv_heads, length, shape.dim, kind))
        for _ in range(shape.layers)
    ]


def first_rows(cache: list[Any], rows: int) -> list[Any]:
    """The bound: a stock cache list that holds just the first `rows` rows of an exact one.

    Layers that are never evicted (sliding windows, …) are taken as they are.
    """
    cut = []
    for layer in cache:
        if not is_plain(layer):
            cut.append(layer)
            continue
        keys, values = (mx.contiguous(part[..., :rows, :]) for part in layer.keys_and_values())
        mx.eval(keys, values)
        cut.append(stock_cache(keys, values))
    return cut


def prose_tokens(tokenizer: Any, length: int, seed: int = 0) -> list[int]:
    """The first `length` tokens of running text, the same ones for a seed.

    Raises:
        ConfigError: `length` is no whole number >= 1.
    """
    wanted = checked_count("length", length, 1)
    stream = library_prose().sentences(seed)
    text, tokens = "", []
    while len(tokens) < wanted:
        # A token has a few characters: enough of them that this seldom runs twice.
        aim = len(text) + 5 * (wanted - len(tokens)) + 100
        while len(text) < aim:
            sentence, begins = next(stream)
            text += ("\n\n" if begins else " ") + sentence if text else sentence
        tokens = list(tokenizer.encode(text))
    return tokens[:wanted]


def random_tokens(vocab: int, length: int, seed: int = 0) -> list[int]:
    """Token ids drawn at random: what they say changes no time and no byte."""
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()
