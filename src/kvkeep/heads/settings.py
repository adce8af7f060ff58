"""What a profile is made with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvkeep.errors import ConfigError
from kvkeep.heads.layers import Streaming
from kvkeep.heads.samples import KINDS
from kvkeep.spec import checked_count
from kvkeep.spec.head_profile import Option

#: Method -> what it does, in one line.
METHODS: Mapping[str, str] = MappingProxyType(
    {
        "optimise": "train a gate per KV head (DuoAttention)",
        "estimate": "attention of late queries that sinks and recent rows do not hold",
        "recall": "attention of recalled tokens to the place they come from",
    }
)
#: Samples looked at where nobody says how many.
DEFAULT_STEPS: Mapping[str, int] = MappingProxyType({"optimise": 300, "estimate": 16, "recall": 16})
STREAMING_FROM = ("question", "start")


@dataclass(frozen=True)
class ProfileSettings:
    """How heads are told apart.

    The defaults of "optimise" are those measured in docs/results/heads; the paper has 2,000 steps
    of new texts, a learning rate of 0.02, 128 + 256 rows, and streams from the start.

    Attributes:
        method: a key of `METHODS`.
        steps: steps taken, each over one sample; None is the method's own default.
        texts: different samples, gone through in turn; 0 is a new one for each step. What
            reading them gives is held in memory, so later rounds cost a fraction ("optimise").
        length: tokens per sample, at most.
        passkeys, words: passkeys per sample, and words or digits in each.
        kind: what passkeys are made of: "words", "numbers", or "both" in turn.
        sinks, recent: rows at the start, and latest rows, that a streaming head keeps.
        seed: of the samples.
        lr: peak learning rate of the gates ("optimise").
        reg: weight of the mean absolute gate in the loss ("optimise").
        streaming_from: where the streaming term begins ("optimise"): "question" reads the
            text in full and gates only what comes after it, which is what eviction after the
            prefill does; "start" gates every token, as the paper does.

    Raises:
        ConfigError: a value is unknown or out of range.
    """

    method: str = "optimise"
    steps: int | None = None
    texts: int = 20
    length: int = 1024
    passkeys: int = 5
    words: int = 8
    kind: str = "both"
    sinks: int = 16
    recent: int = 64
    seed: int = 0
    lr: float = 0.03
    reg: float = 0.05
    streaming_from: str = "question"

    def __post_init__(self) -> None:
        for name, known in (
            ("method", tuple(METHODS)),
            ("streaming_from", STREAMING_FROM),
            ("kind", KINDS),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"unknown {name}", expected=", ".join(known), received=f"{getattr(self, name)}"
                )
        least = {
            "length": 16,
            "passkeys": 1,
            "words": 1,
            "sinks": 0,
            "recent": 1,
            "seed": 0,
            "texts": 0,
        }
        for name, value in least.items():
            checked_count(name, getattr(self, name), value)
        if self.steps is not None:
            checked_count("steps", self.steps, 1)
        for name in ("lr", "reg"):
            value = getattr(self, name)
            good = isinstance(value, int | float) and not isinstance(value, bool)
            if not good or not math.isfinite(value) or value < 0 or (name == "lr" and value == 0):
                raise ConfigError(
                    f"bad value for {name}",
                    expected="a number > 0" if name == "lr" else "a number >= 0",
                    received=f"{value}",
                )

    @property
    def samples(self) -> int:
        """Samples looked at."""
        return DEFAULT_STEPS[self.method] if self.steps is None else self.steps

    @property
    def streaming(self) -> Streaming:
        """What a streaming head reads."""
        return Streaming(self.sinks, self.recent)

    def options(self) -> dict[str, Option]:
        """What the method used beside sinks, recent, seed and steps."""
        used: dict[str, Option] = {
            "length": self.length,
            "passkeys": self.passkeys,
            "words": self.words,
            "kind": self.kind,
        }
        if self.method == "optimise":
            used |= {"lr": self.lr, "reg": self.reg, "streaming_from": self.streaming_from}
            used["texts"] = self.texts
        return used
