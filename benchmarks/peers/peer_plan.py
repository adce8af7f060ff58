"""What is set side by side: policies, budgets, tasks. Standard library only: peers import it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TypeVar

FULL = "full cache"
#: `KVKEEP_PEERS_BUDGETS` and `KVKEEP_PEERS_ONLY` (names of rows, with commas) ask for less.
BUDGETS = tuple(os.environ.get("KVKEEP_PEERS_BUDGETS", "12%,25%,50%").split(","))
#: One question each, and a rate of the full cache above 0 (`frequent-words` and
#: `questions-two-hop` have none on the demo model); `multi-turn` asks several times.
TASKS = (
    "needle-filler",
    "needle-prose",
    "needle-uuid",
    "multi-key",
    "multi-value",
    "multi-query",
    "variable-tracking",
    "common-words",
    "questions",
    "instruction-first",
)
LENGTH = 1000
ROWS_PROMPTS = 3  # on which the kept rows are compared as well
SEED = 2026  # no default of kvkeep was chosen on it


@dataclass(frozen=True)
class Pair:
    """One policy that kvkeep and kvpress both have.

    Attributes:
        name: of the rows.
        ours: the policy as `kvkeep eval --policies` reads it, options set to kvpress's.
        theirs: kvpress's press, as Python would write it; ratio and defaults left out.
        differs: what is not the same rule, for whoever looks for the cause of a difference.
    """

    name: str
    ours: str
    theirs: str
    differs: str = "nothing but the order of equal scores and rounding"


@dataclass(frozen=True)
class Own:
    """A setting of kvkeep's as it ships.

    Attributes:
        name: of the rows.
        ours: as in `Pair`.
        against: name of the pair whose press it is held against; empty: kvpress's best.
    """

    name: str
    ours: str
    against: str = ""


@dataclass(frozen=True)
class Velox:
    """A method of veloxquant-mlx.

    Attributes:
        name: of the rows.
        method: of `KVCacheConfig`.
        options: the flat fields; `{rows}` stands for the rows that the budget allows.
        against: name of the row of kvkeep's that it is held against.
    """

    name: str
    method: str
    options: dict[str, str]
    against: str


Planned = TypeVar("Planned", Pair, Own, Velox)


def _asked(*planned: Planned) -> tuple[Planned, ...]:
    """Those that are asked for; the recommended setting always is."""
    only = os.environ.get("KVKEEP_PEERS_ONLY")
    names = None if only is None else {name.strip() for name in only.split(",")}
    return tuple(
        p for p in planned if names is None or p.name in names or p.name.endswith("(recommended)")
    )


_SNAP = "window=64:pool_kernel=5:sink_tokens=0"
_RAW = "head_scale=none"
_AS_GIVEN = "sink_tokens=0:recent_tokens=0"
PAIRS = _asked(
    Pair("snapkv", f"snapkv:{_SNAP}", "SnapKVPress()"),
    Pair(
        "snapkv-w32",
        "snapkv:window=32:pool_kernel=5:sink_tokens=0",
        "SnapKVPress(window_size=32)",
    ),
    Pair(
        "adakv-snapkv",
        f"snapkv:{_SNAP}:allocation=adaptive:alpha=0.2:{_RAW}",
        "AdaKVPress(SnapKVPress())",
    ),
    Pair(
        "pyramidkv",
        f"snapkv:{_SNAP}:allocation=pyramid-kvpress",
        "PyramidKVPress()",
        "kvpress rounds each layer's rows by itself, kvkeep keeps the exact total",
    ),
    Pair(
        "chunkkv",
        "chunkkv:window=64:sink_tokens=0:recent_tokens=0",
        "ChunkKVPress(SnapKVPress())",
        "kvpress keeps whole chunks of 20, a few rows more or fewer than the budget; kvkeep "
        "fills it exactly",
    ),
    Pair(
        "criticalkv",
        f"criticalkv:{_SNAP}:recent_tokens=0",
        "CriticalKVPress(SnapKVPress())",
    ),
    Pair("tova", "tova:sink_tokens=0", "TOVAPress()"),
    Pair("expected-attention", "expected_attention:recent_tokens=0", "ExpectedAttentionPress()"),
    Pair(
        "adakv-expected",
        f"expected_attention:recent_tokens=0:epsilon=0.01:allocation=adaptive:alpha=0.2:{_RAW}",
        "AdaKVPress(ExpectedAttentionPress(epsilon=0.01))",
    ),
    Pair(
        "kvzip",
        "kvzip:recent_tokens=0:allocation=global:alpha=0",
        "KVzipPress()",
        "kvpress does not replay the template's head (it scores 0 there and goes, 4 sinks aside) "
        "and closes the user's turn before the replay; kvkeep replays the whole prompt after "
        "the instruction alone",
    ),
    Pair("keydiff", f"keydiff:{_AS_GIVEN}", "KeyDiffPress()"),
    Pair("knorm", f"knorm:{_AS_GIVEN}", "KnormPress()"),
    Pair(
        "lagkv",
        "lagkv",
        "LagKVPress()",
        "ranks tie across partitions: torch's top-k takes any of the tied rows, kvkeep the later",
    ),
    Pair(
        "streaming",
        "sink_recent",
        "StreamingLLMPress()",
    ),
)
#: As kvkeep ships them: sinks and recent rows stay.
OWN = _asked(
    Own("lookahead (recommended)", "lookahead"),
    Own("span", "span"),
    Own("snapkv, kvkeep's defaults", "snapkv", "snapkv"),
    Own("chunkkv, kvkeep's defaults", "chunkkv", "chunkkv"),
    Own("kvzip, kvkeep's defaults", "kvzip", "kvzip"),
    Own("keydiff, kvkeep's defaults", "keydiff", "keydiff"),
)
RECOMMENDED = OWN[0]
VELOX = _asked(Velox("snapkv", "snapkv", {"snap_budget": "{rows}"}, "snapkv, kvkeep's defaults"))


def share(budget: str) -> float:
    """The share that a budget such as "25%" means."""
    return float(budget.rstrip("%")) / 100


def rows_of(budget: str, length: int) -> int:
    """Rows per KV head that a share allows, as kvkeep counts them."""
    return max(1, math.floor(share(budget) * length + 1e-9))


def ratio_of(budget: str) -> float:
    """Kvpress's compression ratio: what goes."""
    return 1 - share(budget)
