"""A llama GGUF to an mlx-lm model folder: weights and configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvkeep.demo_model.progress import CONVERT, Report
from kvkeep.errors import DemoModelError

GROUP_SIZE = 32  # GGUF's Q4_0, Q4_1 and Q8_0 blocks

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(path: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Tensors and metadata of a GGUF file; quantised ones as `weight`, `scales` and `biases`.

    Raises:
        DemoModelError: unreadable, or not a llama.
    """
    try:
        loaded: Any = mx.load(str(path), format="gguf", return_metadata=True)
    except Exception as error:  # mlx raises bare RuntimeErrors and ValueErrors here
        raise DemoModelError(f"{path.name} cannot be read as GGUF: {error}") from error
    tensors, metadata = loaded
    if (architecture := metadata.get("general.architecture")) != "llama":
        raise DemoModelError(
            f"{path.name} has the wrong architecture", expected="llama", received=architecture
        )
    return tensors, {key: _plain(value) for key, value in metadata.items()}


def build_config(metadata: dict[str, Any], dtype: str, *, tied: bool) -> dict[str, Any]:
    """mlx-lm's config.json from GGUF metadata."""

    def get(key: str) -> Any:
        if key not in metadata:
            raise DemoModelError(f"The GGUF lacks the metadata {key}")
        return metadata[key]

    heads, hidden = get("llama.attention.head_count"), get("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": get("llama.feed_forward_length"),
        "num_hidden_layers": get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("llama.attention.head_count_kv"),
        "head_dim": metadata.get("llama.rope.dimension_count", hidden // heads),
        "max_position_embeddings": get("llama.context_length"),
        "rms_norm_eps": get("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        "rope_traditional": False,
        "vocab_size": len(get("tokenizer.ggml.tokens")),
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": get("tokenizer.ggml.eos_token_id"),
        "dtype": dtype,
    }


def convert(gguf: Path, folder: Path, dtype: str, report: Report) -> dict[str, Any]:
    """Write `model.safetensors` and `config.json` of a GGUF into `folder`; returns its metadata.

    Args:
        gguf: a llama file with plain, Q4_0, Q4_1 or Q8_0 tensors.
        folder: an existing, empty folder.
        dtype: of the written weights; products of the quantised parts are taken in float32.
        report: told after each tensor.

    Raises:
        DemoModelError: the file is no such llama.
    """
    with mx.stream(mx.cpu):  # the same bits whatever the default device
        tensors, metadata = read_gguf(gguf)
        stems = sorted({name.rpartition(".")[0] for name in tensors})
        config = build_config(metadata, dtype, tied="output" not in stems)
        head_dim = config["head_dim"]
        weights: dict[str, mx.array] = {}
        for done, stem in enumerate(stems):
            report(CONVERT, done, len(stems) + 1)
            dense = dequantized(tensors, stem)
            if stem.endswith((".attn_q", ".attn_k")):
                dense = half_split_rows(dense, head_dim)
            weights[f"{target_name(stem)}.weight"] = dense.astype(getattr(mx, dtype))
            mx.eval(weights)  # one tensor's temporaries at a time
        path = folder / "model.safetensors"
        mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    report(CONVERT, len(stems) + 1, len(stems) + 1)
    return metadata


def dequantized(tensors: dict[str, mx.array], stem: str) -> mx.array:
    """A tensor in float32: mlx keeps q, d and m of w = d·q + m packed; here it is exact."""
    weight = tensors[f"{stem}.weight"]
    if f"{stem}.scales" not in tensors:
        return weight.astype(mx.float32)
    scales, biases = (tensors[f"{stem}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
    bits = weight.shape[-1] // scales.shape[-1]  # 32-bit words of a group of 32
    return mx.dequantize(weight, scales, biases, group_size=GROUP_SIZE, bits=bits)


def half_split_rows(weight: mx.array, head_dim: int) -> mx.array:
    """Rows of a Q or K projection, [heads·D, in], from GGUF's order to the one mlx-lm's RoPE wants.

    GGUF rotates neighbours (2i, 2i+1); mlx-lm's llama rotates i with i + D/2. Moving row 2i to i
    and row 2i+1 to i + D/2 within each head makes the same rotations.
    """
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def target_name(stem: str) -> str:
    """mlx-lm's name of a GGUF tensor, both without ".weight"."""
    if stem in _TOP:
        return _TOP[stem]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None or match[2] not in _LAYER:
        raise DemoModelError(f"The GGUF has a tensor that no llama of mlx-lm has: {stem}")
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}"


def _plain(value: Any) -> Any:
    """Arrays of metadata as Python numbers and lists."""
    if not isinstance(value, mx.array):
        return value
    plain = value.tolist()
    # 1e-5, not the 9.999999747378752e-06 that its float32 spells as a double.
    return float(f"{plain:.7g}") if isinstance(plain, float) else plain
