"""What is compared: settings of eviction, and the full cache."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.allocation import allocation_of
from kvkeep.choosing import require_compatible
from kvkeep.errors import ConfigError
from kvkeep.policies import policy_of
from kvkeep.spec import EvictionConfig

#: What the full cache is called where policies are named.
NONE = "none"
#: Whether the question lies inside what is compressed, or comes after it.
PROTOCOLS = ("aware", "agnostic")
_NAMED = ("policy", "budget", "allocation", "store")

Option = str | int | float | bool


@dataclass(frozen=True)
class Setting:
    """One way to evict, by the names that records keep.

    Attributes:
        policy: "none" is the full cache; the budget is then "100%".
        budget: as `Budget` prints it.
        allocation, store: names.
        options: further fields of the config that are not at their defaults.
    """

    policy: str = NONE
    budget: str = "100%"
    allocation: str = "uniform"
    store: str = "auto"
    options: Mapping[str, Option] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        """Tells settings apart: the same text for the same setting."""
        return " ".join([self.policy, self.budget, self.allocation, self.store, self.told])

    @property
    def name(self) -> str:
        """Policy with what is unusual about it, without the budget."""
        parts = [self.policy]
        if self.allocation != "uniform":
            parts.append(self.allocation)
        if self.store != "auto":
            parts.append(self.store)
        return ", ".join(filter(None, [*parts, self.told]))

    @property
    def told(self) -> str:
        """The options as `name=value`."""
        return " ".join(f"{name}={value}" for name, value in sorted(self.options.items()))


@dataclass(frozen=True)
class Variant:
    """A setting and the config that carries it out.

    Attributes:
        setting: its names.
        config: None is the full cache.
    """

    setting: Setting
    config: EvictionConfig | None = None


#: The full cache.
FULL = Variant(Setting())


def variants_of(
    policies: Sequence[str],
    budgets: Sequence[str],
    allocations: Sequence[str] = ("uniform",),
    stores: Sequence[str] = ("auto",),
) -> tuple[Variant, ...]:
    """The full cache, then every policy at every budget, allocation and store.

    Args:
        policies: names, each with options as in "snapkv:window=32:allocation=adaptive".
        budgets: as `Budget.parse` reads them.
        allocations, stores: names; a policy that names its own is not varied in that.

    Raises:
        ConfigError: a name, an option or a budget is unknown, or a combination has no meaning.
    """
    found = {FULL.setting.key: FULL}
    for text, budget, allocation, store in itertools.product(
        policies, budgets, allocations, stores
    ):
        name, options = parse_policy(text)
        if name == NONE:
            continue
        config = EvictionConfig.parse(
            {"allocation": allocation, "store": store, **options, "policy": name, "budget": budget}
        )
        require_compatible(config, policy_of(config), allocation_of(config))
        variant = Variant(setting_of(config), config)
        found.setdefault(variant.setting.key, variant)
    return tuple(found.values())


def setting_of(config: EvictionConfig | None) -> Setting:
    """A config by its names. Of a head profile, its file's name and a hash of it."""
    if config is None:
        return Setting()
    options: dict[str, Option] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in _NAMED or value == field.default:
            continue
        if field.name == "head_profile":
            value = _file_name(str(value))
        elif field.name == "protect":
            value = ",".join(f"{start}:{stop}" for start, stop in value)
        options[field.name] = value
    return Setting(config.policy, str(config.limit), config.allocation, config.store, options)


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """A policy's name and options: "snapkv:window=32" is snapkv with a window of 32.

    Raises:
        ConfigError: an option has no value, or names the policy or the budget.
    """
    name, *told = (part.strip() for part in text.split(":"))
    options: dict[str, Any] = {}
    for part in told:
        option, equals, value = part.partition("=")
        option = option.strip().replace("-", "_")
        if not equals or not option or not value or option in ("policy", "budget"):
            raise ConfigError(
                f"unreadable policy {text!r}",
                expected='a name with options, such as "snapkv:window=32:allocation=adaptive"',
                received=repr(part),
            )
        options[option] = _value(value.strip())
    return name, options


def _value(text: str) -> Option:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _file_name(path: str) -> str:
    file = Path(path)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:8] if file.is_file() else "missing"
    return f"{file.name}@{digest}"
