"""What tables and reports show of a run: medians, their intervals, and the ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep.bench.results import Compaction, DecodeResult, DecodeRun, PromptResult
from kvkeep.bench.timing import Spread, ratios


@dataclass(frozen=True)
class DecodeRow:
    """One contender of a decode result.

    Attributes:
        run: it.
        speed: tokens per second of all requests together.
        against_exact: its speed over that of the exact caches, within each round; None for
            the exact ones.
        against_bound: likewise over that of a stock cache of as many rows; None for both.
    """

    run: DecodeRun
    speed: Spread
    against_exact: Spread | None
    against_bound: Spread | None


@dataclass(frozen=True)
class PrefillRow:
    """A way to read a prompt.

    Attributes:
        name: "stock", or the policy that it is read for.
        seconds: of the prefill alone.
        against_stock: its time over that of the stock prefill, within each round; None for
            that one.
        after: seconds of scoring and compaction after it; None for the stock one.
        share_after: that over the same prompt's prefill.
        peak_nbytes: bytes in use at most, prefill to compaction, the median of the rounds.
        peak_against_stock: that over the stock prefill's.
    """

    name: str
    seconds: Spread
    against_stock: Spread | None
    after: Spread | None
    share_after: Spread | None
    peak_nbytes: int
    peak_against_stock: float | None


@dataclass(frozen=True)
class CompactionRow:
    """What one setting makes of an exact cache.

    Attributes:
        compaction: its figures.
        score, compact: seconds.
        live_share, allocated_share: bytes after over bytes before.
    """

    compaction: Compaction
    score: Spread
    compact: Spread
    live_share: float
    allocated_share: float


def decode_rows(result: DecodeResult) -> list[DecodeRow]:
    """Every contender, in the order of the result."""
    rows = []
    for run in result.runs:
        speeds = result.speeds(run)
        exact = bound = None
        if run.role != "exact":
            exact = Spread.of(ratios(speeds, result.speeds(result.exact)))
        if run.role == "evicted":
            bound = Spread.of(ratios(speeds, result.speeds(result.bound_of(run))))
        rows.append(DecodeRow(run, Spread.of(speeds), exact, bound))
    return rows


def prefill_rows(result: PromptResult) -> list[PrefillRow]:
    """The stock prefill, then each policy's; nothing where no prompt was read."""
    if not result.stock_seconds:
        return []
    stock_peak = _middle(result.stock_peak_nbytes)
    stock = Spread.of(result.stock_seconds)
    rows = [PrefillRow("stock", stock, None, None, None, stock_peak, None)]
    for prefill in result.prefills:
        after = [
            score + compact
            for score, compact in zip(prefill.score_seconds, prefill.compact_seconds, strict=True)
        ]
        peak = _middle(prefill.peak_nbytes)
        rows.append(
            PrefillRow(
                name=prefill.setting.policy,
                seconds=Spread.of(prefill.seconds),
                against_stock=Spread.of(ratios(prefill.seconds, result.stock_seconds)),
                after=Spread.of(after),
                share_after=Spread.of(ratios(after, prefill.seconds)),
                peak_nbytes=peak,
                peak_against_stock=peak / stock_peak,
            )
        )
    return rows


def compaction_rows(result: PromptResult) -> list[CompactionRow]:
    """Every setting, in the order of the result."""
    return [
        CompactionRow(
            compaction=found,
            score=Spread.of(found.score_seconds),
            compact=Spread.of(found.compact_seconds),
            live_share=found.compact_nbytes / found.exact_nbytes,
            allocated_share=found.compact_allocated / found.exact_allocated,
        )
        for found in result.compactions
    ]


def _middle(values: Sequence[int]) -> int:
    return round(Spread.of(values).median)
