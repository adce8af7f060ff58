"""What one run measures: lengths × settings × batch sizes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvkeep.allocation import allocation_of
from kvkeep.choosing import require_compatible
from kvkeep.errors import ConfigError
from kvkeep.evictable import sees_all_from_replay
from kvkeep.generation import RECOMMENDED
from kvkeep.policies import policy_of
from kvkeep.spec import EvictionConfig, checked_count

_LENGTH = re.compile(r"(\d{1,9})(k?)", re.IGNORECASE)


@dataclass(frozen=True)
class BenchPlan:
    """Everything that one run measures.

    Attributes:
        lengths: prompt positions T.
        settings: what is evicted, and how the rest is stored. They are measured with
            `min_tokens=0`, so that short prompts are evicted too.
        batches: requests that decode together.
        tokens: decode steps per round.
        rounds: of decoding.
        prompt_rounds: of the prefill, and of scoring and compaction.
        prefill_step: tokens per chunk of a prefill.
        seed: of the order within the rounds.

    Raises:
        ConfigError: a list is empty, or a number is no whole number of at least 1.
    """

    lengths: tuple[int, ...]
    settings: tuple[EvictionConfig, ...]
    batches: tuple[int, ...] = (1,)
    tokens: int = 8
    rounds: int = 15
    prompt_rounds: int = 3
    prefill_step: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("lengths", "settings", "batches"):
            if not getattr(self, name):
                raise ConfigError(f"no {name} to measure", expected="at least one")
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        for name, values in (("length", self.lengths), ("batch size", self.batches)):
            for value in values:
                checked_count(name, value, 1)
        for name in ("tokens", "rounds", "prompt_rounds", "prefill_step"):
            checked_count(name, getattr(self, name), 1)
        checked_count("seed", self.seed, 0)
        settings = tuple(replace(config, min_tokens=0) for config in self.settings)
        object.__setattr__(self, "settings", settings)

    def settings_at(self, length: int) -> tuple[EvictionConfig, ...]:
        """The settings that evict anything of T positions (of a byte budget the cache tells)."""
        return tuple(
            config
            for config in self.settings
            if config.limit.unit == "bytes" or config.limit.rows(length) < length
        )

    def require_evicting(self) -> None:
        """Refuse a plan that would find nothing to evict, before anything is computed.

        Raises:
            ConfigError: at some length every budget holds the whole prompt.
        """
        for length in self.lengths:
            if not self.settings_at(length):
                raise ConfigError(
                    f"nothing is evicted of {length} tokens",
                    expected="a budget below the length",
                    received=", ".join(dict.fromkeys(str(c.limit) for c in self.settings)),
                )

    def require_replayable(self) -> None:
        """Refuse policies that need a prefill, where there is none (a random model).

        Raises:
            ConfigError: names the policy.
        """
        for config in self.settings:
            if not sees_all_from_replay(policy_of(config)):
                raise ConfigError(
                    f"policy {config.policy!r} must see the whole prefill, and a synthetic"
                    " model has none",
                    expected="a policy that scores by the prompt's last queries or by its rows",
                    received=config.policy,
                )


def combined(
    policies: Sequence[str],
    budgets: Sequence[str],
    stores: Sequence[str],
    allocations: Sequence[str] = ("uniform",),
) -> tuple[tuple[EvictionConfig, ...], tuple[str, ...]]:
    """Every combination that has a meaning, and why the others have none.

    Raises:
        ConfigError: a name or a budget is unknown, or no combination has a meaning.
    """
    settings, refused = [], []
    for policy, allocation, budget, store in itertools.product(
        policies, allocations, budgets, stores
    ):
        config = replace(
            RECOMMENDED, policy=policy, allocation=allocation, budget=budget, store=store
        )
        # Unknown names are a fault of their own, told before what does not go together.
        known = policy_of(config), allocation_of(config)
        try:
            require_compatible(config, *known)
        except ConfigError as error:
            refused.append(error)
        else:
            settings.append(config)
    if not settings and refused:
        raise refused[0]
    return tuple(settings), tuple(dict.fromkeys(str(error) for error in refused))


def parse_lengths(text: str, what: str = "lengths") -> tuple[int, ...]:
    """Read whole numbers such as "512,1k,32k"; k is 1,024.

    Raises:
        ConfigError: one of them is unreadable or 0.
    """
    values = []
    for part in names(text):
        match = _LENGTH.fullmatch(part)
        number = int(match[1]) * (1024 if match[2] else 1) if match else 0
        if number < 1:
            raise ConfigError(
                f"unreadable {what}", expected='numbers such as "512,1k,4k" (k is 1024)',
                received=part,
            )  # fmt: skip
        values.append(number)
    return tuple(values)


def names(text: str) -> list[str]:
    """The parts of a comma-separated list, without spaces and empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]
