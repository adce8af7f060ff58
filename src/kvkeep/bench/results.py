"""What a run finds: typed figures, every one of every round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvkeep.bench.machine import Device, ModelFacts, is_busy
from kvkeep.errors import BenchFileError
from kvkeep.spec import EvictionConfig

#: Marks the file, and the version of its layout. A reader takes its own version only.
FORMAT, VERSION = "kvkeep bench", 1

#: exact: stock caches of T rows. bound: stock caches of R rows, which no store that keeps R
#: rows can beat. evicted: a setting's compact caches.
Role = Literal["exact", "bound", "evicted"]
Stored = Literal["shared", "per-head", "ragged", "union"]


@dataclass(frozen=True)
class Setting:
    """A choice of score, budget, allocation and store, as the user spelled it."""

    policy: str
    budget: str
    allocation: str
    store: str

    @classmethod
    def of(cls, config: EvictionConfig) -> Setting:
        """What of a config tables and files name."""
        return cls(config.policy, str(config.limit), config.allocation, config.store)

    def __str__(self) -> str:
        allocation = "" if self.allocation == "uniform" else f", {self.allocation}"
        return f"{self.policy} {self.budget}{allocation}, {self.store}"


@dataclass(frozen=True)
class Prefill:
    """Prompts read for eviction by one policy, through `compact_prompt_cache`.

    Attributes:
        setting: the policy's first one; the others' prefills are the same.
        seconds: of the observed prefill, per round.
        score_seconds, compact_seconds: after it, per round.
        peak_nbytes: bytes in use at most, per round, the model's weights included.
    """

    setting: Setting
    seconds: tuple[float, ...]
    score_seconds: tuple[float, ...]
    compact_seconds: tuple[float, ...]
    peak_nbytes: tuple[int, ...]

    def __post_init__(self) -> None:
        _require_rounds(
            self, ("seconds", "score_seconds", "compact_seconds", "peak_nbytes"), len(self.seconds)
        )


@dataclass(frozen=True)
class Compaction:
    """One exact cache evicted by one setting.

    Attributes:
        setting: what was asked for.
        stored: the store it became.
        rows: kept per KV head (the mean, rounded, where they differ).
        score_seconds, compact_seconds: per round.
        exact_nbytes, compact_nbytes: bytes of the live K/V rows before and after.
        exact_allocated, compact_allocated: bytes of the buffers.
    """

    setting: Setting
    stored: Stored
    rows: int
    score_seconds: tuple[float, ...]
    compact_seconds: tuple[float, ...]
    exact_nbytes: int
    compact_nbytes: int
    exact_allocated: int
    compact_allocated: int

    def __post_init__(self) -> None:
        _require_rounds(self, ("score_seconds", "compact_seconds"), len(self.score_seconds))


@dataclass(frozen=True)
class PromptResult:
    """What reading and compacting a prompt takes.

    Attributes:
        length: T.
        step: tokens per chunk of the prefill.
        seed: of the order within the rounds.
        session: index of the session that measured it.
        stock_seconds: of the stock prefill, per round; empty where there was none (a random
            model's caches are filled with random rows).
        stock_peak_nbytes: its bytes in use at most, the model's weights included.
        prefills: one per policy, from the same rounds; empty likewise.
        compactions: one per setting.
    """

    length: int
    step: int
    seed: int
    session: int
    stock_seconds: tuple[float, ...]
    stock_peak_nbytes: tuple[int, ...]
    prefills: tuple[Prefill, ...]
    compactions: tuple[Compaction, ...]

    def __post_init__(self) -> None:
        _require_least(self, {"length": 1, "step": 1, "seed": 0, "session": 0})
        if self.stock_seconds:
            _require_rounds(self, ("stock_seconds", "stock_peak_nbytes"), len(self.stock_seconds))
        for prefill in self.prefills:
            _require_rounds(prefill, ("seconds",), len(self.stock_seconds))

    @property
    def rounds(self) -> int:
        """Rounds of compaction, and of the prefill where there was one."""
        return max((len(c.score_seconds) for c in self.compactions), default=0)


@dataclass(frozen=True)
class DecodeRun:
    """One contender's rounds.

    Attributes:
        role: exact, bound or evicted.
        setting: of the evicted ones, else None.
        rows: per KV head and request before the first step.
        seconds: per round, for all its steps.
        live_nbytes: bytes of all requests' live K/V rows before the first step.
        allocated_nbytes: bytes of the buffers that the steps run over.
        peak_nbytes: bytes in use at most over a round, with the model's weights and without
            the other contenders.
    """

    role: Role
    setting: Setting | None
    rows: int
    seconds: tuple[float, ...]
    live_nbytes: int
    allocated_nbytes: int
    peak_nbytes: int

    def __post_init__(self) -> None:
        _require_rounds(self, ("seconds",), len(self.seconds))
        _require_least(self, {"rows": 1, "live_nbytes": 1, "allocated_nbytes": 1, "peak_nbytes": 1})
        if (self.setting is None) == (self.role == "evicted"):
            raise _fault("a setting belongs to evicted runs", f"{self.role}, {self.setting}")

    @property
    def name(self) -> str:
        """What tables call it."""
        if self.setting is not None:
            return str(self.setting)
        return "exact" if self.role == "exact" else f"bound: stock cache of {self.rows:,} rows"


@dataclass(frozen=True)
class DecodeResult:
    """Steps of every contender, interleaved in one run.

    Attributes:
        length: T.
        batch: requests that decode together.
        tokens: decode steps per round; each gives a token to every request.
        seed: of the order within the rounds.
        session: index of the session that measured it.
        runs: the exact one first, then the bounds, then the settings.
    """

    length: int
    batch: int
    tokens: int
    seed: int
    session: int
    runs: tuple[DecodeRun, ...]

    def __post_init__(self) -> None:
        _require_least(self, {"length": 1, "batch": 1, "tokens": 1, "seed": 0, "session": 0})
        if [run.role for run in self.runs[:1]] != ["exact"]:
            raise _fault("the exact run comes first", f"{[run.role for run in self.runs]}")
        bounds = [run.rows for run in self.runs if run.role == "bound"]
        for run in self.runs:
            _require_rounds(run, ("seconds",), len(self.exact.seconds))
            if run.role == "evicted" and run.rows not in bounds:
                raise _fault(f"no bound of {run.rows} rows", f"bounds of {bounds}")

    @property
    def exact(self) -> DecodeRun:
        """The run over the exact caches."""
        return self.runs[0]

    @property
    def rounds(self) -> int:
        """Rounds of each run."""
        return len(self.exact.seconds)

    def bound_of(self, run: DecodeRun) -> DecodeRun:
        """The bound with as many rows as an evicted run."""
        return next(b for b in self.runs if b.role == "bound" and b.rows == run.rows)

    def speeds(self, run: DecodeRun) -> tuple[float, ...]:
        """Tokens per second of all requests together, per round."""
        return tuple(self.batch * self.tokens / seconds for seconds in run.seconds)


Result = PromptResult | DecodeResult


@dataclass(frozen=True)
class Session:
    """One run of the command, as far as a file's results come from it.

    Attributes:
        started: UTC, ISO 8601.
        load_start, load_end: average load of the machine over a minute; the second is None
            where the process was ended before it could note it.
        cores: of the processor.
    """

    started: str
    load_start: float
    load_end: float | None
    cores: int

    @property
    def busy(self) -> bool:
        """Whether something else ran before it started, so that its times say little."""
        return is_busy(self.load_start, self.cores)


@dataclass(frozen=True)
class BenchReport:
    """Everything in one file: one device, one model, any number of sessions.

    Attributes:
        device, model: what all of it was taken on.
        sessions: in the order they ran.
        results: in the order they were measured.
    """

    device: Device
    model: ModelFacts
    sessions: tuple[Session, ...] = ()
    results: tuple[Result, ...] = ()

    def __post_init__(self) -> None:
        for result in self.results:
            if result.session >= len(self.sessions):
                raise _fault("a result of no session", f"session {result.session}")

    @property
    def prompts(self) -> tuple[PromptResult, ...]:
        """What reading and compacting took."""
        return tuple(r for r in self.results if isinstance(r, PromptResult))

    @property
    def decodes(self) -> tuple[DecodeResult, ...]:
        """What decoding took."""
        return tuple(r for r in self.results if isinstance(r, DecodeResult))

    @property
    def busy(self) -> bool:
        """Whether any of the results come from a machine that was busy."""
        return any(self.sessions[result.session].busy for result in self.results)


def _require_rounds(result: object, names: Sequence[str], rounds: int) -> None:
    """The same number of rounds everywhere, at least one, each figure finite and above 0."""
    for name in names:
        values = getattr(result, name)
        if not values or len(values) != rounds:
            raise _fault(f"{name} of {len(values)} rounds", f"{rounds} rounds elsewhere")
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise _fault(f"{name} that no clock or counter gives", f"{values}")


def _require_least(result: object, bounds: dict[str, int]) -> None:
    for name, least in bounds.items():
        if getattr(result, name) < least:
            raise _fault(f"{name} below {least}", f"{getattr(result, name)}")


def _fault(problem: str, received: str) -> BenchFileError:
    return BenchFileError(problem, received=received)
