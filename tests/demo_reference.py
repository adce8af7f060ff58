"""An independent reading of llama GGUF files in NumPy: parser, block formats, forward, writer.

Nothing here is shared with the package or with mlx: tests compare the two. Layouts follow the GGUF
and GGML format descriptions; the forward rotates neighbouring pairs: GGUF's order of Q and K.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8
_BLOCK = {F32: (1, 4), F16: (1, 2), Q4_1: (32, 20), Q8_0: (32, 34)}  # elements, bytes
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: shape outermost first, GGML type, byte offset in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int


class Gguf:
    """Metadata and lazily read tensors of one file."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self._at = 0
        magic, version, n_tensors, n_meta = self._take("<4sIQQ")
        assert (magic, version) == (b"GGUF", 3)
        self.metadata: dict[str, Any] = {}
        for _ in range(n_meta):
            key = self._string()
            self.metadata[key] = self._value(self._take("<I")[0])
        infos = [self._info() for _ in range(n_tensors)]
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        data = -(-self._at // alignment) * alignment
        self.tensors = {name: Tensor(shape, kind, data + at) for name, shape, kind, at in infos}

    def _take(self, layout: str) -> tuple[Any, ...]:
        size = struct.calcsize(layout)
        values = struct.unpack(layout, self._bytes[self._at : self._at + size].tobytes())
        self._at += size
        return values

    def _string(self) -> str:
        (length,) = self._take("<Q")
        return self._take(f"<{length}s")[0].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, length = self._take("<IQ")
            return [self._value(inner) for _ in range(length)]
        return self._take("<" + _SCALARS[kind])[0]

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (n,) = self._take("<I")
        shape = tuple(reversed(self._take(f"<{n}Q")))
        kind, offset = self._take("<IQ")
        return name, shape, kind, offset

    def read(self, name: str) -> np.ndarray:
        """A tensor in float64 (exact: the products of float16 and 8-bit integers fit)."""
        tensor = self.tensors[name]
        per_block, block_bytes = _BLOCK[tensor.kind]
        size = int(np.prod(tensor.shape)) // per_block * block_bytes
        raw = np.asarray(self._bytes[tensor.start : tensor.start + size])
        if tensor.kind in (F32, F16):
            flat = raw.view(np.float32 if tensor.kind == F32 else np.float16).astype(np.float64)
            return flat.reshape(tensor.shape)
        blocks = raw.reshape(-1, block_bytes)
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float64)
        if tensor.kind == Q8_0:
            values = scale * blocks[:, 2:].view(np.int8)
        else:
            minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float64)
            nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
            values = scale * nibbles + minimum
        return values.reshape(tensor.shape)


def llama_logits(gguf: Gguf, ids: list[int]) -> np.ndarray:
    """Logits [T, vocabulary] in float64 of a llama with tied embeddings, straight from the file."""
    meta = gguf.metadata
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    eps, base = meta["llama.attention.layer_norm_rms_epsilon"], meta["llama.rope.freq_base"]
    dim = meta["llama.embedding_length"] // heads
    steps = len(ids)
    embedding = gguf.read("token_embd.weight")
    x = embedding[ids]
    for layer in range(meta["llama.block_count"]):

        def weight(part: str, layer: int = layer) -> np.ndarray:
            return gguf.read(f"blk.{layer}.{part}.weight")

        normed = _rms(x, weight("attn_norm"), eps)
        q, k, v = (
            (normed @ weight(f"attn_{part}").T).reshape(steps, n, dim).swapaxes(0, 1)
            for part, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = _rotate_pairs(q, base), _rotate_pairs(k, base)
        k, v = (np.repeat(a, heads // kv_heads, axis=0) for a in (k, v))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(dim)
        scores[:, np.triu(np.ones((steps, steps), bool), 1)] = -np.inf
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (scores / scores.sum(axis=-1, keepdims=True)) @ v
        x = x + mixed.swapaxes(0, 1).reshape(steps, -1) @ weight("attn_output").T
        normed = _rms(x, weight("ffn_norm"), eps)
        gate = normed @ weight("ffn_gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ weight("ffn_up").T)) @ weight("ffn_down").T
    return _rms(x, gguf.read("output_norm.weight"), eps) @ embedding.T


def _rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def _rotate_pairs(x: np.ndarray, base: float) -> np.ndarray:
    """RoPE on neighbours (2i, 2i+1) of [heads, T, D]."""
    dim = x.shape[-1]
    angles = np.outer(np.arange(x.shape[1]), base ** (-np.arange(0, dim, 2) / dim))
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, np.ndarray]]
) -> None:
    """Write a GGUF file of (GGML type, values); integers become u32, floats f32, lists arrays."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _packed_string(key) + _packed_value(value)
    data = b""
    for name, (kind, values) in tensors.items():
        dims = values.shape[::-1]
        head += _packed_string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        head += struct.pack("<IQ", kind, len(data))
        block = _encoded(kind, values)
        data += block + bytes(-len(block) % _ALIGNMENT)
    path.write_bytes(head + bytes(-len(head) % _ALIGNMENT) + data)


def _packed_string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _packed_value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _packed_string(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(
            map(_packed_string, value)
        )
    return struct.pack(f"<IIQ{len(value)}i", _ARRAY, 5, len(value), *value)


def _encoded(kind: int, values: np.ndarray) -> bytes:
    if kind in (F32, F16):
        return values.astype(np.float32 if kind == F32 else np.float16).tobytes()
    blocks = values.reshape(-1, 32)
    if kind == Q8_0:
        scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
        codes = np.clip(np.round(blocks / scale), -127, 127).astype(np.int8)
        return np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=1).tobytes()
    minimum = blocks.min(axis=1, keepdims=True)
    scale = ((blocks.max(axis=1, keepdims=True) - minimum) / 15).astype(np.float16)
    codes = np.clip(np.round((blocks - minimum) / scale), 0, 15).astype(np.uint8)
    nibbles = codes[:, :16] | codes[:, 16:] << 4
    header = [scale.view(np.uint8), minimum.astype(np.float16).view(np.uint8)]
    return np.concatenate([*header, nibbles], axis=1).tobytes()
