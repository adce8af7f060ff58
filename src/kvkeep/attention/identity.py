"""Which model a profile belongs to."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from kvkeep.attention.observe import model_name
from kvkeep.errors import HeadProfileError
from kvkeep.spec import HeadProfile

_SAMPLES = 64  # values per weight array


def model_identity(model: Any) -> str:
    """A model's type and a hash of its configuration and weights, 32 hex digits.

    The hash is over the configuration that mlx-lm keeps (`model.args`), over each weight's
    name and shape, and over up to 64 values of each, spread evenly. Values of floating
    point are compared as float16, so a float32 and a float16 copy count as one model. Where the
    files lie plays no part. A quantised copy, an adapter and a fine-tune count as other models.
    """
    digest = hashlib.sha256(b"kvkeep model 1\n")
    digest.update(json.dumps(_settings(model), sort_keys=True, default=str).encode())
    weights: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    for name, weight in sorted(weights, key=lambda entry: entry[0]):
        digest.update(f"\n{name} {tuple(weight.shape)}\n".encode())
        digest.update(_sample(weight))
    return f"{model_name(model)}:{digest.hexdigest()[:32]}"


def require_profile_of(profile: HeadProfile, model: Any) -> None:
    """Refuse a profile that was made of another model.

    Raises:
        HeadProfileError: names both.
    """
    own = model_identity(model)
    if profile.model != own:
        known = f" ({profile.model_name})" if profile.model_name else ""
        raise HeadProfileError(
            "the head profile is of another model",
            expected=f"a profile of {own}",
            received=f"one of {profile.model}{known}",
            remedy="Make one with `kvkeep heads profile`.",
        )


def _settings(model: Any) -> dict[str, Any]:
    args = getattr(model, "args", None)
    if dataclasses.is_dataclass(args) and not isinstance(args, type):
        known = dataclasses.asdict(args)
    else:
        known = dict(getattr(args, "__dict__", {}))
    return {name: _rounded(value) for name, value in known.items() if "path" not in name}


def _rounded(value: Any) -> Any:
    """Floats to six digits: converters that go through float32 write 9.99999975e-06 for 1e-05."""
    return f"{value:.6g}" if isinstance(value, float) else value


def _sample(weight: mx.array) -> bytes:
    flat = weight.reshape(-1)
    step = max(flat.size // _SAMPLES, 1)
    some = flat[::step][:_SAMPLES]
    if mx.issubdtype(some.dtype, mx.floating):
        some = some.astype(mx.float16)
    return np.asarray(mx.contiguous(some)).tobytes()
