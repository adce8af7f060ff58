"""What figures were taken on: the device, the versions, the model, how busy it all was."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from kvkeep import blas
from kvkeep.attention import model_identity

#: One-minute load per core above which a machine is busy with something else.
BUSY = 0.5


@dataclass(frozen=True)
class Device:
    """What a model runs on; no host name, no path.

    Attributes:
        kind: MLX's default device.
        name: the GPU's or the processor's.
        system: operating system and architecture.
        cores: of the processor.
        blas: what the CPU backend calls, and why.
        python, mlx, mlx_lm, kvkeep: versions.
    """

    kind: Literal["cpu", "gpu"]
    name: str
    system: str
    cores: int
    blas: str
    python: str
    mlx: str
    mlx_lm: str
    kvkeep: str

    @classmethod
    def present(cls) -> Device:
        """The one that MLX uses by default in this process."""
        used = blas.load()
        return cls(
            kind="cpu" if mx.default_device().type == mx.DeviceType.cpu else "gpu",
            name=device_name(),
            system=f"{platform.system()} {platform.machine()}",
            cores=os.cpu_count() or 1,
            blas=f"{used.name} ({used.status})",
            python=platform.python_version(),
            mlx=_version("mlx"),
            mlx_lm=_version("mlx-lm"),
            kvkeep=_version("kvkeep"),
        )


@dataclass(frozen=True)
class ModelFacts:
    """Which model.

    Attributes:
        name: what people call it.
        identity: hash of its configuration and weights (`kvkeep.attention.model_identity`).
        dtype: of its K/V rows.
        weights_nbytes: bytes of its parameters.
        synthetic: the shape of a random model, as the command line spells it; else empty.
    """

    name: str
    identity: str
    dtype: str
    weights_nbytes: int
    synthetic: str = ""

    @classmethod
    def of(cls, model: Any, name: str, synthetic: str = "") -> ModelFacts:
        """The facts of a loaded model; runs one token through it."""
        cache: list[Any] = make_prompt_cache(model)
        mx.eval(model(mx.array([[0]]), cache=cache))
        rows = next((c.keys for c in cache if getattr(c, "keys", None) is not None), None)
        return cls(
            name=name,
            identity=model_identity(model),
            dtype="" if rows is None else str(rows.dtype).removeprefix("mlx.core."),
            weights_nbytes=sum(weight.nbytes for weight in _parameters(model)),
            synthetic=synthetic,
        )


def device_name() -> str:
    """Name of MLX's default device: the GPU's, or the processor's."""
    details = dict(mx.device_info(mx.default_device()))
    return str(details.get("device_name") or _processor() or platform.processor() or "unknown")


def load_average() -> float:
    """How many processes ran or waited in the last minute, on average."""
    return os.getloadavg()[0]


def is_busy(load: float, cores: int) -> bool:
    """Whether a load is one under which times say little."""
    return load > BUSY * cores


def _processor() -> str:
    """The processor's name as Linux tells it; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "")


def _parameters(model: Any) -> Iterable[mx.array]:
    weights: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    return (weight for _, weight in weights)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
