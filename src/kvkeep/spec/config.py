"""One frozen choice of score, allocation and store, parsed the same way everywhere."""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from kvkeep.errors import ConfigError
from kvkeep.spec.budget import Budget

STORES = ("auto", "shared", "per-head", "ragged", "union")
POOLINGS = ("avg", "max", "none")
GROUPINGS = ("mean", "max")
HEAD_SCALES = ("sum", "none")


@dataclass(frozen=True)
class EvictionConfig:
    """What to evict and how the rest is stored.

    Attributes:
        policy: registered policy name (see `kvkeep.policies`).
        budget: anything `Budget.parse` reads; it is read at once, and `limit` is the result.
        allocation: registered allocation name.
        store: "shared" (one set per layer), "per-head" (equal counts), "ragged" (unequal
            counts, in groups of heads of equal length), "union" (every head stores what any
            head keeps, under a mask), or "auto": what the policy and the allocation choose.
        alpha: share of a head's even part that it gets whatever its scores (adaptive
            allocations); None is the allocation's default.
        head_scale: "sum" or "none": how heads' scores are made comparable (adaptive
            allocations); None is the allocation's default.
        beta: how steep the pyramid is; None is the allocation's default.
        tau1, tau2: how little entropy and variance count (allocation "cake"); None is its
            default.
        retrieval_share: share of all heads that retrieve (allocation "duo"); None is as many
            as fit with all their rows.
        max_groups: lengths that the heads of a ragged layer may have, at most: fewer groups
            are fewer attention calls, more groups follow the allocation closer.
        head_profile: path of the head profile that allocation "duo" reads, or None.
        window: W, the last prompt queries that score; None is the policy's default.
        pool_kernel: odd width of the score pooling in positions; None is the policy's default.
        pooling: "avg", "max" or "none"; None is the policy's default.
        group: "mean" or "max" over the query heads of a KV head; None is the policy's default.
        chunk_size: positions that are scored together: that stay or go as one (ChunkKV), that
            attend to each other (non-causal attention), that are read again at once (KVzip);
            None is the policy's default.
        lag: positions per partition (LagKV); None is the policy's default.
        cross: compare partitions' values instead of ranks (LagKV); None is the default.
        gamma: weight of the variance (CAKE); None is the policy's default.
        mix: share of attention in the score (R-KV); None is the policy's default.
        n_future: positions ahead that expected queries are averaged over (expected
            attention); None is the policy's default.
        covariance: count how queries spread about their mean (likewise).
        value_norm: multiply by the length of the value (likewise).
        epsilon: added to attention before that product, or before that with the output
            weights (CriticalKV); None is the policy's default.
        stage_share: share of the budget that attention alone chooses (CriticalKV); None is
            the policy's default.
        draft_tokens: tokens that the model drafts of its answer, to score by (lookahead); None is
            the policy's default.
        sink_tokens: first positions that always stay (they shrink to a smaller budget).
        recent_tokens: last positions that always stay; None is the policy's default.
        min_tokens: prompts of at most this many tokens are kept whole.
        guarantee_sinks: False caps the sinks at max(1, budget // 8), as the seeds can.
        protect: half-open ranges [start, stop) of positions that are never evicted.
        seed: for policies that draw.
        score_chunk_size: window queries scored at once, at most.

    Raises:
        ConfigError: a value is out of range or of the wrong type.
    """

    policy: str = "snapkv-d"
    budget: Budget | int | float | str = 512
    allocation: str = "uniform"
    store: str = "auto"
    window: int | None = None
    pool_kernel: int | None = None
    pooling: str | None = None
    group: str | None = None
    chunk_size: int | None = None
    lag: int | None = None
    cross: bool | None = None
    gamma: float | None = None
    mix: float | None = None
    n_future: int | None = None
    covariance: bool | None = None
    value_norm: bool | None = None
    epsilon: float | None = None
    stage_share: float | None = None
    draft_tokens: int | None = None
    alpha: float | None = None
    head_scale: str | None = None
    beta: int | None = None
    tau1: float | None = None
    tau2: float | None = None
    retrieval_share: float | None = None
    max_groups: int = 4
    head_profile: str | None = None
    sink_tokens: int = 4
    recent_tokens: int | None = None
    min_tokens: int = 128
    guarantee_sinks: bool = True
    protect: tuple[tuple[int, int], ...] = ()
    seed: int = 0
    score_chunk_size: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", Budget.parse(self.budget))
        object.__setattr__(self, "protect", parse_ranges(self.protect))
        for name in ("policy", "allocation", "store"):
            _require(isinstance(getattr(self, name), str), name, "a name", getattr(self, name))
        _require(self.store in STORES, "store", f"one of {', '.join(STORES)}", self.store)
        _require_int("window", self.window, 1, optional=True)
        _require_int("pool_kernel", self.pool_kernel, 1, optional=True)
        if self.pool_kernel is not None:
            odd = self.pool_kernel % 2 == 1
            _require(odd, "pool_kernel", "an odd number of positions", self.pool_kernel)
        if self.pooling is not None:
            known = self.pooling in POOLINGS
            _require(known, "pooling", f"one of {', '.join(POOLINGS)}", self.pooling)
        for name, known in (("group", GROUPINGS), ("head_scale", HEAD_SCALES)):
            value = getattr(self, name)
            _require(value is None or value in known, name, f"one of {', '.join(known)}", value)
        _require_int("chunk_size", self.chunk_size, 1, optional=True)
        _require_int("lag", self.lag, 1, optional=True)
        for name in ("cross", "covariance", "value_norm"):
            value = getattr(self, name)
            _require(value is None or isinstance(value, bool), name, "true or false", value)
        _require_number("gamma", self.gamma, "a finite number >= 0", sys.float_info.max)
        _require_number("epsilon", self.epsilon, "a finite number >= 0", sys.float_info.max)
        _require_number("mix", self.mix, "a number between 0 and 1", 1)
        _require_number("stage_share", self.stage_share, "a number between 0 and 1", 1)
        _require_int("n_future", self.n_future, 1, optional=True)
        _require_int("draft_tokens", self.draft_tokens, 1, optional=True)
        _require_number("alpha", self.alpha, "a number between 0 and 1", 1)
        _require_number("retrieval_share", self.retrieval_share, "a number between 0 and 1", 1)
        for name in ("tau1", "tau2"):
            value = getattr(self, name)
            expected = "a finite number above 0"
            _require_number(name, value, expected, sys.float_info.max)
            _require(value is None or value > 0, name, expected, value)
        _require_int("beta", self.beta, 1, optional=True)
        _require_int("max_groups", self.max_groups, 1)
        _require_path("head_profile", self.head_profile)
        _require_int("sink_tokens", self.sink_tokens, 0)
        _require_int("recent_tokens", self.recent_tokens, 0, optional=True)
        _require_int("min_tokens", self.min_tokens, 0)
        _require_int("seed", self.seed, 0)
        _require_int("score_chunk_size", self.score_chunk_size, 1)
        boolean = isinstance(self.guarantee_sinks, bool)
        _require(boolean, "guarantee_sinks", "true or false", self.guarantee_sinks)

    @property
    def limit(self) -> Budget:
        """`budget` as a `Budget`."""
        return Budget.parse(self.budget)

    @classmethod
    def parse(
        cls, settings: Mapping[str, Any], base: EvictionConfig | None = None
    ) -> EvictionConfig:
        """Build a config from names and values (keywords, flags or a request's fields).

        Names may use "-" for "_". A value of None leaves the setting as in `base`.

        Raises:
            ConfigError: a name is unknown, or a value is out of range.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        changes: dict[str, Any] = {}
        for raw, value in settings.items():
            name = str(raw).replace("-", "_")
            if name not in known:
                raise ConfigError(
                    f"unknown eviction setting {raw!r}",
                    expected=f"one of {', '.join(sorted(known))}",
                    received=raw,
                )
            if value is not None:
                changes[name] = value
        return dataclasses.replace(base or cls(), **changes)


def parse_ranges(value: object) -> tuple[tuple[int, int], ...]:
    """Read protected ranges: pairs [start, stop), or text such as `"0:512,900:910"`.

    Texts of one range each, as a repeated flag gives them, may stand for pairs.

    Raises:
        ConfigError: a range is unreadable, negative or empty.
    """
    expected = 'ranges start:stop with 0 <= start < stop, such as "0:512,900:910"'
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if not isinstance(value, Sequence):
        raise ConfigError("unreadable protect ranges", expected=expected, received=repr(value))
    ranges = []
    for pair in value:
        try:
            start, stop = _texts(pair) if isinstance(pair, str) else map(operator.index, pair)
        except (TypeError, ValueError):
            raise ConfigError(
                "unreadable protect range", expected=expected, received=repr(pair)
            ) from None
        _require(0 <= start < stop, "protect", expected, f"{start}:{stop}")
        ranges.append((start, stop))
    return tuple(sorted(ranges))


def _texts(pair: str) -> tuple[int, int]:
    start, stop = pair.split(":")
    return int(start), int(stop)


def _require(holds: bool, name: str, expected: str, received: object) -> None:
    if not holds:
        raise ConfigError(f"bad value for {name}", expected=expected, received=repr(received))


def _require_int(name: str, value: object, least: int, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    _require(whole and value >= least, name, f"a whole number >= {least}", value)  # type: ignore[operator]


def _require_number(name: str, value: object, expected: str, most: float) -> None:
    """An optional number from 0 to `most`."""
    if value is not None:
        number = isinstance(value, Real) and not isinstance(value, bool)
        _require(number and 0 <= value <= most, name, expected, value)  # type: ignore[operator]


def _require_path(name: str, value: object) -> None:
    path = value is None or (isinstance(value, str) and value.strip() != "")
    _require(path, name, "the path of a file", value)
