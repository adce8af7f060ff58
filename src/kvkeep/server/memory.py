"""How much memory there is, and how much of it a flag means."""

from __future__ import annotations

import os

import mlx.core as mx

from kvkeep.errors import ConfigError
from kvkeep.spec import Budget

_EXPECTED = "bytes (8GB, 512MiB) or a share of the machine's memory (40%)"


def memory_bytes(text: str) -> int:
    """The bytes that a size, or a share of this machine's memory, means.

    Raises:
        ConfigError: it is neither.
    """
    try:
        size = Budget.parse(text)
    except ConfigError as error:
        raise ConfigError("bad value for --kv-memory", expected=_EXPECTED, received=text) from error
    if size.unit == "share":
        return int(size.amount * device_memory())
    if size.unit == "rows":
        raise ConfigError(
            "bad value for --kv-memory",
            expected=_EXPECTED,
            received=f"{text}, a number without a unit",
        )
    return int(size.amount)


def device_memory() -> int:
    """Bytes of memory that MLX's device has: a GPU's, or the machine's."""
    told = mx.device_info().get("memory_size")
    if told:
        return int(told)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
