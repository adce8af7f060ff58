"""Allocations by name. Adding one: its file, and its class in `ALLOCATIONS`."""

from __future__ import annotations

from typing import Any

from kvkeep.allocation.adaptive import Adaptive, Global
from kvkeep.allocation.base import Allocation
from kvkeep.allocation.cake import CakeLayers
from kvkeep.allocation.duo import Duo
from kvkeep.allocation.pyramid import Pyramid, PyramidKvpress
from kvkeep.allocation.uniform import Uniform
from kvkeep.spec import EvictionConfig, load_head_profile, named, with_options

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
ALLOCATION_OPTIONS = ("alpha", "head_scale", "beta", "tau1", "tau2", "retrieval_share")


def get_allocation(name: str, **options: Any) -> Allocation:
    """The allocation of that name; an option of None keeps its default.

    Raises:
        ConfigError: the name or an option is unknown to it.
    """
    return with_options("allocation", named("allocation", name, ALLOCATIONS), name, options)


def allocation_of(config: EvictionConfig) -> Allocation:
    """The allocation that a config names, with the options that it sets; a profile is read.

    Raises:
        ConfigError: the name or an option is unknown, or the profile cannot be read.
    """
    options = {name: getattr(config, name) for name in ALLOCATION_OPTIONS}
    if config.head_profile is not None:
        options["profile"] = load_head_profile(config.head_profile)
    return get_allocation(config.allocation, **options)
