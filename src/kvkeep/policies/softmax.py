"""Softmax over keys; on a CPU with an exponential of additions and multiplications."""

from __future__ import annotations

import mlx.core as mx

# 2^r on [-1/2, 1/2], by a least-squares fit at Chebyshev nodes: relative error below 1e-7.
_TERMS = (1.0, 0.693147206, 0.240226466, 0.0555032900, 0.00961851953, 0.00133998604, 0.000153375768)
_LOG2_E = 1.4426950408889634


def softmax(scores: mx.array) -> mx.array:
    """Softmax of float32 scores over the last axis; -inf gives 0."""
    if not _on_cpu():
        return mx.softmax(scores, axis=-1)
    powers = _exp(scores - scores.max(axis=-1, keepdims=True))
    return powers * (1 / powers.sum(axis=-1, keepdims=True))


def exp(scores: mx.array) -> mx.array:
    """e^x of float32 x <= 0, to 3e-6 of the value; 0 below 1e-37 on a CPU."""
    return _exp(scores) if _on_cpu() else mx.exp(scores)


def _on_cpu() -> bool:
    # MLX's exponential on CPUs takes 12 ns a value, which is most of what scoring costs there;
    # these twenty cheap passes take 3. On a GPU they would be twenty kernels instead of one.
    return mx.default_device().type == mx.cpu


def _exp(x: mx.array) -> mx.array:
    """e^x = 2^n * 2^r with n whole: n goes into the exponent's bits, r into a polynomial."""
    power = mx.maximum(x * _LOG2_E, -126.0)
    whole = (power - 0.5).astype(mx.int32)  # the nearest, as power <= 0; mx.round is slow
    rest = power - whole
    value = rest * _TERMS[6] + _TERMS[5]
    for term in _TERMS[4::-1]:
        value = value * rest + term
    value = value * ((whole + 127) << 23).view(mx.float32)
    return mx.where(power > -126.0, value, 0.0)
