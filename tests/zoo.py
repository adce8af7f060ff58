"""Every model type of mlx-lm that can be built small: tiny, random, in float32."""

from __future__ import annotations

import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path
from mlx_lm.utils import MODEL_REMAPPING

from kvkeep.checking import ModelReport, check_model
from zoo_more import MORE

VOCAB = 100
_FILE = Path(__file__).parent / "fixtures" / "model_zoo.json"
_SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}

#: What differs from the file: sizes that cost a CPU seconds, windows longer than the prompt.
CHANGES: dict[str, dict[str, Any]] = {
    "afm7": {"num_layers": 6, "num_kv_reuse_layers": 2},
    "afmoe": {"sliding_window": 12},
    "baichuan_m1": {"sliding_window": 12},
    "bailing_moe_linear": {**_SMALL, "num_hidden_layers": 4, "moe_intermediate_size": 64},
    "cohere2": {"sliding_window": 12},
    "dbrx": {"d_model": 64, "ffn_config.ffn_hidden_size": 64},
    "deepseek_v32": {"index_topk": 16, "index_n_heads": 2, "index_head_dim": 64},
    "exaone_moe": {"sliding_window": 12},
    "falcon_h1": {
        **_SMALL,
        "num_attention_heads": 4,
        "head_dim": 16,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
    },
    "gemma": {**_SMALL, "head_dim": 16},
    "gemma3_text": {"num_hidden_layers": 4, "sliding_window_pattern": 2, "sliding_window": 12},
    "gemma3n": {
        "text_config.num_hidden_layers": 6,
        "text_config.layer_types": ["sliding_attention", "full_attention"] * 3,
        "text_config.activation_sparsity_pattern": [0.5] * 6,
    },
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2, "num_key_value_heads": 4},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2},
    "gpt_oss": {
        "hidden_size": 64,
        "intermediate_size": 64,
        "head_dim": 16,
        "num_local_experts": 4,
        "sliding_window": 12,
    },
    "internlm2": _SMALL,
    "internlm3": _SMALL,
    "iquestloopcoder": {"loop_window_size": 12},
    "lfm2": {"hidden_size": 64, "block_dim": 64, "block_ff_dim": 64},
    "lfm2_moe": {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64},
    "llama": {**_SMALL, "layer_types": ["full_attention"] * 2},
    "mamba": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "time_step_rank": 4,
    },
    "minicpm": _SMALL,
    "nanochat": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
    },
    "olmo3": {"sliding_window": 12},
    "openelm": {
        "model_dim": 64,
        "head_dim": 16,
        "num_transformer_layers": 3,
        "num_kv_heads": [3, 4, 5],
        "num_query_heads": [12, 16, 20],
        "ffn_multipliers": [0.5, 1.0, 2.0],
    },
    "phi3small": {"vocab_size": 100352, "hidden_size": 32},  # it writes to fixed token ids
    "pixtral": {"text_config.hidden_size": 64, "text_config.intermediate_size": 64},
    "plamo": {**_SMALL, "num_attention_heads": 8, "n_shared_head": 4},
    "qwen2": _SMALL,
    "qwen2_moe": {
        **_SMALL,
        "num_experts": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3": {**_SMALL, "head_dim": 16},
    "qwen3_moe": {**_SMALL, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 64},
    "mimo_v2_flash": {"sliding_window_size": 12},
    "recurrent_gemma": {"attention_window_size": 12},
    "smollm3": {**_SMALL, "num_hidden_layers": 4},
    "stablelm": _SMALL,
    "starcoder2": _SMALL,
    "step3p5": {"sliding_window": 12},
}


def _merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = json.loads(json.dumps(config))
    for path, value in changes.items():
        *folders, name = path.split(".")
        place = merged
        for folder in folders:
            place = place[folder]
        place[name] = value
    vocab = changes.get("vocab_size", VOCAB)
    for part in (merged, merged.get("text_config", {})):
        part.update({k: vocab for k in part if k.startswith("vocab_size")})
    return merged


#: The file's types, by model type.
NAMED: dict[str, dict[str, Any]] = {
    kind: _merged(config, CHANGES.get(kind, {}))
    for kind, config in json.loads(_FILE.read_text()).items()
}
#: Those and the other model files.
ZOO = NAMED | {kind: {"model_type": kind, **config} for kind, config in MORE.items()}


def build(kind: str, seed: int = 0) -> Any:
    """A random model of a type, in float32, with attention that is not flat."""
    config = ZOO[kind]
    module = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}")
    mx.random.seed(seed)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map_with_path(_sharper, model.parameters()))
    mx.eval(model.parameters())
    return model


@cache
def model_of(kind: str) -> Any:
    """The type's model, built once."""
    return build(kind)


@cache
def report_of(kind: str) -> ModelReport:
    """What eviction does on it."""
    return check_model(model_of(kind), measure=False)


def _sharper(path: str, weight: mx.array) -> mx.array:
    """Queries that tell rows apart, sinks that count, and no zeros where a checkpoint has none."""
    name = path.removesuffix(".weight").rpartition(".")[2]
    if name in ("gate", "lm_head") and weight.ndim > 1:
        return weight + mx.random.normal(weight.shape) * weight.shape[-1] ** -0.5
    if name == "sinks" or name.endswith(("sink_bias", "conv_k", "conv_v")):
        return mx.random.normal(weight.shape)
    if name in ("q_proj", "q_b_proj", "o_proj", "qkv_proj", "query_key_value", "wqkv", "wo"):
        return weight * 3
    return weight


def tokens_of(length: int, seed: int = 0) -> list[int]:
    """A prompt of random token ids."""
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()
