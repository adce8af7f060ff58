"""A model folder that `mlx_lm.load` reads: a tiny random llama, a tokenizer, a chat template."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tiny_models import tiny_llama

SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
END = SPECIAL.index("<|end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if not (loop.last and continue_final_message) %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ opening }}{% endif %}"
)


def write_tiny_folder(
    folder: Path,
    *,
    seed: int = 0,
    template: str | None = CHAT_TEMPLATE,
    endless: bool = False,
    every_byte: bool = False,
) -> Path:
    """Write config.json, model.safetensors and the tokenizer's files; returns the folder.

    Every character is a token of its own (printable ASCII and the space; others are dropped,
    unless `every_byte`), so the number of tokens is known from the text, and an answer is one line.

    Args:
        seed: of the weights.
        template: the chat template, or None for a tokenizer without one.
        every_byte: each byte is a token, so that any text can be read, as real tokenizers do.
        endless: never choose the end token while decoding greedily.
    """
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    letters = sorted(c for c in alphabet if every_byte or c.isascii() or c == "Ġ")
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    model = tiny_llama(vocab=len(vocabulary), head_dim=32, seed=seed)  # 32: can be quantised
    if endless:
        model.lm_head.weight[END] = 0  # of a hundred logits some are greater
    sizes = dataclasses.asdict(model.args)
    config = {name: value for name, value in sizes.items() if value is not None}
    config["eos_token_id"] = END
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights: list[tuple[str, Any]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(weights), metadata={"format": "mlx"}
    )
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
