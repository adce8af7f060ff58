"""Allocations by name. Adding one: its file, and its class in `ALLOCATIONS`."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from kvkeep.allocation.adaptive import Adaptive, Global
from kvkeep.allocation.base import Allocation
from kvkeep.allocation.cake import CakeLayers
from kvkeep.allocation.duo import Duo
from kvkeep.allocation.pyramid import Pyramid, PyramidKvpress
from kvkeep.allocation.uniform import Uniform
from kvkeep.errors import ConfigError
from kvkeep.spec import EvictionConfig, load_head_profile

_CLASSES: tuple[type[Allocation], ...] = (
    Uniform,
    Pyramid,
    PyramidKvpress,
    Adaptive,
    Global,
    CakeLayers,
    Duo,
)
ALLOCATIONS: dict[str, type[Allocation]] = {cls.name: cls for cls in _CLASSES}

# Settings of an EvictionConfig that are options of some allocations: None leaves the default,
# and an allocation without the option refuses what is set.
_OPTIONS = ("alpha", "head_scale", "beta", "tau1", "tau2", "retrieval_share")


def get_allocation(name: str, **options: Any) -> Allocation:
    """The allocation of that name; an option of None keeps its default.

    Raises:
        ConfigError: the name or an option is unknown to it.
    """
    allocation = ALLOCATIONS.get(name) if isinstance(name, str) else None
    if allocation is None:
        near = difflib.get_close_matches(str(name), ALLOCATIONS, n=1, cutoff=0.4)
        raise ConfigError(
            "unknown allocation",
            expected=f"one of {', '.join(sorted(ALLOCATIONS))}",
            received=repr(name),
            remedy=f"Did you mean {near[0]!r}?" if near else None,
        )
    known = {field.name for field in dataclasses.fields(allocation)}
    given = {key: value for key, value in options.items() if value is not None}
    if unknown := sorted(set(given) - known):
        raise ConfigError(
            f"allocation {name!r} has no option {unknown[0]!r}",
            expected=f"options {', '.join(sorted(known)) or '(none)'}",
            received=f"{unknown[0]}={given[unknown[0]]!r}",
            remedy="Leave it out, or choose an allocation that has it.",
        )
    return allocation(**given)


def allocation_of(config: EvictionConfig) -> Allocation:
    """The allocation that a config names, with the options that it sets; a profile is read.

    Raises:
        ConfigError: the name or an option is unknown, or the profile cannot be read.
    """
    options = {name: getattr(config, name) for name in _OPTIONS}
    if config.head_profile is not None:
        options["profile"] = load_head_profile(config.head_profile)
    return get_allocation(config.allocation, **options)
