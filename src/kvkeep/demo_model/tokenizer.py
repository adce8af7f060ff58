"""The tokenizer files of a model folder, from a GGUF's vocabulary, merges and chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvkeep.errors import DemoModelError

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF that are never split


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE that splits numbers into single digits (GGUF's "gpt2" model, "smollm" rule).

    A byte that the vocabulary lacks (some control characters and unassigned planes) is dropped.

    Raises:
        DemoModelError: the metadata describes another kind of tokenizer, or none.
    """
    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise DemoModelError(
            "The GGUF has another tokenizer", expected="('gpt2', 'smollm')", received=kind
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges: list[tuple[str, str]] = []
    for line in metadata["tokenizer.ggml.merges"]:
        left, _, right = line.partition(" ")
        merges.append((left, right))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


def write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, as transformers and mlx-lm read them.

    Raises:
        DemoModelError: the metadata describes another kind of tokenizer, or none.
    """
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
    }
    config = {
        # Takes tokenizer.json as it is; GPT-2's class would rebuild it without digit splitting.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **{name: tokens[metadata[key]] for name, key in named.items() if key in metadata},
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
