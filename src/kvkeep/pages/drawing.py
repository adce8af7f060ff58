"""Pictures by matplotlib, which is an extra."""

from __future__ import annotations

import importlib
from typing import Any

from kvkeep.errors import ConfigError


def require_matplotlib() -> Any:
    """The module of matplotlib that draws.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed",
            remedy="Install it with: pip install 'kvkeep[eval]'",
        ) from error
