"""Tiny random models, small enough to run in milliseconds, and a tokenizer for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask
from mlx_lm.tokenizer_utils import TokenizerWrapper

VOCAB = 64


def tiny_llama(
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int = 32,
    vocab: int = VOCAB,
    seed: int = 0,
    sharpness: float = 4.0,
    sliding_layers: Sequence[int] = (),
    sliding_window: int = 16,
) -> llama.Model:
    """A random llama of mlx-lm's own code, in float32.

    Args:
        layers, heads, kv_heads, head_dim, hidden, vocab: L, H_q, H_kv, D and the widths.
        seed: of the weights; the same seed gives the same model.
        sharpness: factor on the query weights. At 1 attention is nearly uniform, and a
            lost row would hardly change a token.
        sliding_layers: layers that attend to the last `sliding_window` positions only.
    """
    mx.random.seed(seed)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=hidden,
            num_hidden_layers=layers,
            intermediate_size=2 * hidden,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=1e-5,
            vocab_size=vocab,
            tie_word_embeddings=False,  # tied, a random model mostly repeats its last token
            layer_types=[
                "sliding_attention" if i in sliding_layers else "full_attention"
                for i in range(layers)
            ],
            sliding_window=sliding_window if sliding_layers else None,
        )
    )
    for layer in model.layers:
        layer.self_attn.q_proj.weight = layer.self_attn.q_proj.weight * sharpness
        layer.self_attn.o_proj.weight = layer.self_attn.o_proj.weight * sharpness
    mx.eval(model.parameters())
    return model


def nudged(model: nn.Module, amount: float, seed: int = 1) -> nn.Module:
    """`model` with noise on its weights, in place: a draft model that is often right."""
    mx.random.seed(seed)
    noisy = tree_map(
        lambda w: w + amount * mx.std(w) * mx.random.normal(w.shape), model.parameters()
    )
    model.update(noisy)
    mx.eval(model.parameters())
    return model


class BareAttentionLayer(nn.Module):
    """A transformer block that calls `mx.fast.scaled_dot_product_attention` itself."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.rope = nn.RoPE(head_dim)
        self.norm = nn.RMSNorm(hidden)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        h = self.norm(x)
        batch, length, _ = h.shape

        def split(rows: mx.array, heads: int) -> mx.array:
            return rows.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)

        queries = self.rope(split(self.q_proj(h), self.heads), offset=cache.offset)
        keys = self.rope(split(self.k_proj(h), self.kv_heads), offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, split(self.v_proj(h), self.kv_heads))
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.head_dim**-0.5, mask=mask
        )
        return x + self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))


class BareAttentionModel(nn.Module):
    """A model of such blocks: kvkeep's attention seam never sees its queries."""

    def __init__(
        self,
        *,
        layers: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        hidden: int = 32,
        vocab: int = VOCAB,
    ) -> None:
        super().__init__()
        self.model_type = "bare"
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers = [BareAttentionLayer(hidden, heads, kv_heads, head_dim) for _ in range(layers)]

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        h = self.embed_tokens(inputs)
        mask = create_attention_mask(h, cache[0])
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            h = layer(h, mask, layer_cache)
        return self.embed_tokens.as_linear(h)


def tiny_bare_model(seed: int = 0, **sizes: int) -> BareAttentionModel:
    """A random `BareAttentionModel` in float32."""
    mx.random.seed(seed)
    model = BareAttentionModel(**sizes)
    mx.eval(model.parameters())
    return model


class _Letters:
    """What mlx-lm asks of a tokenizer, one character per token."""

    bos_token = None
    eos_token_id = None
    chat_template = None

    def get_vocab(self) -> dict[str, int]:
        return {chr(0x100 + i): i for i in range(VOCAB)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % VOCAB for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(0x100 + int(i)) for i in ids)

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))

    def __len__(self) -> int:
        return VOCAB


def tiny_tokenizer() -> TokenizerWrapper:
    """One character per token, no end-of-text token: a run never stops early."""
    return TokenizerWrapper(_Letters())


def random_tokens(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """A prompt of random token ids."""
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def parameters_of(model: nn.Module) -> dict[str, np.ndarray]:
    """All weights as float64 NumPy arrays, by dotted name."""
    flat: list[tuple[str, Any]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    return {name: np.asarray(weight, np.float64) for name, weight in flat}
