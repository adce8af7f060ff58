"""Models beyond the tiny llama, and what a model's attention really was given."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from tiny_models import BareAttentionLayer, BareAttentionModel

#: Smallest sizes that these model types run with; values as in mlx-lm's own tests, shrunk.
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-4,
        "vocab_size": 64,
        "query_pre_attn_scalar": 144.0,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "deepseek_v3": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 4,
        "q_lora_rank": 4,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 0,
    },
    "kimi_linear": {  # latent attention whose queries are not rotated, so nobody sees them
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts": 2,
        "head_dim": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "linear_attn_config": {"head_dim": 16, "kda_layers": [3], "num_heads": 2},
        "rope_theta": 100.0,
        "rms_norm_eps": 1e-6,
        "model_max_length": 1000,
    },
    "gemma3_text": {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 64,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "max_position_embeddings": 4096,
    },
    "gpt_oss": {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": 16,
        "rope_scaling": None,
    },
    "mamba": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 8,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
}


def tiny_model(model_type: str, seed: int = 0) -> Any:
    """A random model of one of mlx-lm's other types, in float32."""
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    mx.random.seed(seed)
    config = {"model_type": model_type, **CONFIGS[model_type]}
    model = module.Model(module.ModelArgs.from_dict(config))
    if model_type == "gpt_oss":  # else its sinks are zero and no test would miss them
        for layer in model.layers:
            layer.self_attn.sinks = mx.random.normal(layer.self_attn.sinks.shape)
    mx.eval(model.parameters())
    return model


class SeenLayer(BareAttentionLayer):
    """The same block, with its attention through mlx-lm's function."""

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        h = self.norm(x)
        batch, length, _ = h.shape
        queries, keys, values = (
            project(h).reshape(batch, length, -1, self.head_dim).transpose(0, 2, 1, 3)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = (self.rope(rows, offset=cache.offset) for rows in (queries, keys))
        keys, values = cache.update_and_fetch(keys, values)
        # Looked up when called, as in a model module that kvkeep has covered.
        out = base.scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.head_dim**-0.5, mask=mask
        )
        return x + self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))


class PartlySeenModel(BareAttentionModel):
    """Some layers call `mx.fast` attention themselves, the others go through mlx-lm.

    Args:
        seen: for each layer, whether the attention seam can see it.
        sliding: for each layer, whether its cache is a sliding window.
    """

    def __init__(self, seen: Sequence[bool], sliding: Sequence[bool]) -> None:
        super().__init__(layers=len(seen))
        for index, visible in enumerate(seen):
            if visible:
                self.layers[index] = SeenLayer(32, 4, 2, 16)
        self._sliding = tuple(sliding)

    def make_cache(self) -> list[Any]:
        return [RotatingKVCache(512) if slides else KVCache() for slides in self._sliding]


class _Recorder:
    """Stands in for a layer's RoPE and keeps what it gives: queries, then keys."""

    def __init__(self, rope: nn.Module) -> None:
        self.rope, self.rows = rope, []

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        self.rows.append(self.rope(x, offset=offset))
        return self.rows[-1]


def attention_inputs(
    model: Any, tokens: Sequence[int], step: int = 2048
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Post-RoPE queries [H_q, T, D] and keys [H_kv, T, D] of each layer, as the model has them.

    Read off the model's own rotation in a stock prefill, `step` tokens at a time.
    """
    owners = [getattr(layer, "self_attn", layer) for layer in model.layers]
    recorders = [_Recorder(owner.rope) for owner in owners]
    for owner, recorder in zip(owners, recorders, strict=True):
        owner.rope = recorder
    try:
        cache = make_prompt_cache(model)
        for start in range(0, len(tokens), step):
            model(mx.array(list(tokens[start : start + step]))[None], cache=cache)
            mx.eval([c.state for c in cache], [r.rows for r in recorders])
    finally:
        for owner, recorder in zip(owners, recorders, strict=True):
            owner.rope = recorder.rope
    found = []
    for recorder in recorders:
        queries, keys = recorder.rows[::2], recorder.rows[1::2]
        found.append((np.concatenate(queries, axis=2)[0], np.concatenate(keys, axis=2)[0]))
    return found


def window_weights(queries: np.ndarray, keys: np.ndarray, window: int) -> np.ndarray:
    """Float64 attention [H_q, W, T] of the last W queries, causal, scaled by 1/sqrt(D)."""
    heads, length, dim = queries.shape
    window = min(window, length)
    weights = np.zeros((heads, window, length))
    for head in range(heads):
        rows = keys[head // (heads // len(keys))].astype(np.float64)
        for row in range(window):
            seen = length - window + row + 1
            logits = rows[:seen] @ queries[head, seen - 1].astype(np.float64) * dim**-0.5
            logits = np.exp(logits - logits.max())
            weights[head, row, :seen] = logits / logits.sum()
    return weights


def layer_bytes(layer: Any) -> dict[str, Any]:
    """Everything a layer's cache holds: its live state as plain values, for comparing."""
    state = layer.state
    flat = list(state) if isinstance(state, (list, tuple)) else [state]
    out: dict[str, Any] = {"type": type(layer).__name__}
    for index, part in enumerate(flat):
        if isinstance(part, mx.array):
            rows = part[..., : layer.offset, :] if type(layer) is KVCache else part
            out[str(index)] = (rows.shape, np.asarray(rows.astype(mx.float32)).tobytes())
        else:
            out[str(index)] = repr(part)
    return out


def cache_bytes(cache: Sequence[Any]) -> list[dict[str, Any]]:
    """`layer_bytes` of every layer."""
    return [layer_bytes(layer) for layer in cache]
