"""Slow, independent references: attention and a llama in float64 NumPy, stock decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import base, llama
from mlx_lm.models.cache import make_prompt_cache

from tiny_models import parameters_of


def masked_attention(
    queries: Any,
    keys: Any,
    values: Any,
    allowed: np.ndarray,
    scale: float,
    sinks: Any = None,
) -> np.ndarray:
    """Softmax attention in float64, computed row by row as the formula says.

    Args:
        queries: [H_q, n, D].
        keys, values: [H_kv, T, D].
        allowed: bool [H_kv, n, T] or [n, T], which rows each query may read.
        sinks: [H_q], logits of a row that has no value.

    Returns:
        [H_q, n, D_v].
    """
    q, k, v = (np.asarray(x, np.float64) for x in (queries, keys, values))
    allowed = np.broadcast_to(allowed, (len(k), q.shape[1], k.shape[1]))
    group = len(q) // len(k)
    out = np.zeros((len(q), q.shape[1], v.shape[2]))
    for head in range(len(q)):
        for row in range(q.shape[1]):
            seen = np.flatnonzero(allowed[head // group, row])
            logits = k[head // group, seen] @ q[head, row] * scale
            extra = [] if sinks is None else [float(np.asarray(sinks)[head])]
            top = max([*logits.tolist(), *extra])
            weights = np.exp(logits - top)
            total = weights.sum() + sum(np.exp(e - top) for e in extra)
            out[head, row] = weights / total @ v[head // group, seen]
    return out


def causal_weights(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Float64 causal attention [H_q, n, T]: the queries are those of the last n positions."""
    queries, keys = queries.astype(np.float64), keys.astype(np.float64)
    keys = np.repeat(keys, len(queries) // len(keys), axis=0)
    logits = queries @ keys.swapaxes(1, 2) / np.sqrt(queries.shape[-1])
    count, length = logits.shape[1:]
    logits[:, np.triu(np.ones((count, length), bool), length - count + 1)] = -np.inf
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def evicted_mask(
    length: int, kept: Sequence[Sequence[int]], evicted_at: int, until: int | None = None
) -> np.ndarray:
    """Which positions each position reads when a prompt is evicted after its prefill.

    Args:
        length: positions in all.
        kept: kept prompt positions per head (one list for all heads).
        evicted_at: T; positions before it were read by each other in full.
        until: positions from here on were trimmed and written again; `evicted_at` if None.

    Returns:
        bool [heads, length, length].
    """
    start = evicted_at if until is None else until
    index = np.arange(length)
    causal = index[None] <= index[:, None]
    mask = np.repeat(causal[None], len(kept), axis=0)
    for head, positions in enumerate(kept):
        gone = np.setdiff1d(np.arange(start), np.asarray(positions, int))
        mask[head, start:, gone] = False
    return mask


def numpy_llama(model: llama.Model, tokens: Sequence[int], allowed: np.ndarray) -> np.ndarray:
    """Logits [n, vocab] of a whole sequence in float64, every layer under its own mask.

    Written from the architecture's definition (RMSNorm, rotary halves, grouped heads,
    SwiGLU); it shares no code with mlx-lm.

    Args:
        allowed: bool [L, H_kv or 1, n, n].
    """
    w, args = parameters_of(model), model.args
    dim = args.head_dim or args.hidden_size // args.num_attention_heads
    x = w["model.embed_tokens.weight"][np.asarray(tokens)]
    for layer in range(args.num_hidden_layers):
        name = f"model.layers.{layer}."
        h = _rms_norm(x, w[name + "input_layernorm.weight"], args.rms_norm_eps)
        q, k, v = (
            (h @ w[f"{name}self_attn.{kind}_proj.weight"].T)
            .reshape(len(tokens), -1, dim)
            .transpose(1, 0, 2)
            for kind in "qkv"
        )
        mixed = masked_attention(
            rotated(q, args.rope_theta), rotated(k, args.rope_theta), v, allowed[layer], dim**-0.5
        )
        mixed = mixed.transpose(1, 0, 2).reshape(len(tokens), -1)
        x = x + mixed @ w[name + "self_attn.o_proj.weight"].T
        h = _rms_norm(x, w[name + "post_attention_layernorm.weight"], args.rms_norm_eps)
        gate = h @ w[name + "mlp.gate_proj.weight"].T
        up = h @ w[name + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[name + "mlp.down_proj.weight"].T
    x = _rms_norm(x, w["model.norm.weight"], args.rms_norm_eps)
    return x @ w["lm_head.weight"].T


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rotated(rows: np.ndarray, base: float) -> np.ndarray:
    """Rotary embedding of [H, n, D] at positions 0 … n-1; the two halves form the pairs."""
    half = rows.shape[-1] // 2
    angles = np.arange(rows.shape[1])[:, None] * base ** (-np.arange(half) / half)
    first, second = rows[..., :half], rows[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def prefilled(
    model: Any,
    tokens: Sequence[int],
    step: int = 2048,
    make_cache: Callable[[Any], list[Any]] = make_prompt_cache,
) -> list[Any]:
    """A cache list filled with `tokens`, `step` at a time, as mlx-lm's prefill does it."""
    cache = make_cache(model)
    for start in range(0, len(tokens), step):
        model(mx.array(list(tokens[start : start + step]))[None], cache=cache)
        mx.eval([c.state for c in cache])
    return cache


def logits_of(model: Any, cache: list[Any], tokens: Sequence[int]) -> np.ndarray:
    """Append `tokens` in one forward: logits [n, vocab]."""
    return np.asarray(model(mx.array(list(tokens))[None], cache=cache)[0])


def greedy(
    model: Any, cache: list[Any], last_token: int, count: int
) -> tuple[list[int], np.ndarray]:
    """Decode `count` tokens one by one: (tokens, logits [count, vocab])."""
    tokens, rows = [], []
    token = last_token
    for _ in range(count):
        rows.append(logits_of(model, cache, [token])[-1])
        token = int(rows[-1].argmax())
        tokens.append(token)
    return tokens, np.stack(rows)


def greedy_batch(
    model: Any, cache: list[Any], last_tokens: Sequence[int], count: int
) -> tuple[list[list[int]], np.ndarray]:
    """Decode `count` tokens of B requests: (tokens per request, logits [B, count, vocab])."""
    columns, rows = [], []
    tokens = list(last_tokens)
    for _ in range(count):
        logits = model(mx.array(tokens)[:, None], cache=cache)[:, -1]
        rows.append(np.asarray(logits))
        tokens = rows[-1].argmax(-1).tolist()
        columns.append(tokens)
    return [list(column) for column in zip(*columns, strict=True)], np.stack(rows, axis=1)


def attend(
    cache: Any,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float = 1.0,
    sinks: mx.array | None = None,
) -> np.ndarray:
    """One attention call over a cache, as mlx-lm's models make it: [B, H_q, n, D_v]."""
    mask = cache.make_mask(queries.shape[2])
    live = cache.update_and_fetch(keys, values)
    # Looked up at call time, as a model module does: kvkeep may have taken its place.
    call = base.scaled_dot_product_attention
    return np.asarray(call(queries, *live, cache=cache, scale=scale, mask=mask, sinks=sinks))


def raw(array: mx.array) -> bytes:
    """The bytes of an array, for comparisons that forgive nothing."""
    return np.asarray(mx.contiguous(array)).tobytes()
