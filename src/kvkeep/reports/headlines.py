"""What a run found, in a sentence or two, computed from its figures."""

from __future__ import annotations

from collections.abc import Sequence

from kvkeep.bench import (
    BenchReport,
    DecodeResult,
    DecodeRow,
    Spread,
    compaction_rows,
    decode_rows,
    spread_words,
)
from kvkeep.evaluation import ALL_TASKS, NONE, Summary, TaskSummary
from kvkeep.pages import count
from kvkeep.reports.divergence import Stretches, stretches
from kvkeep.reports.scores import Block, blocks
from kvkeep.reports.speed import batch_words

NO_RESULTS = "There are no results yet."


def eval_headline(summary: Summary) -> str:
    """The best setting at the smallest budget, beside the full cache: for tasks, then a text."""
    told = []
    by_protocol = {block.protocol: block for block in sorted(blocks(summary), key=_length)}
    for block in by_protocol.values():  # the longest prompts of each
        told.append(_scores(block))
    if not told:
        told = [_fidelity(found) for found in stretches(summary)[-1:]]
    if told:
        return " ".join(told)
    return "Figures of lm-evaluation-harness are below." if summary.harness else NO_RESULTS


def bench_headline(report: BenchReport) -> str:
    """The fastest setting at the longest prompt, beside the exact cache and the bound."""
    if report.decodes:
        most = max(result.length for result in report.decodes)
        result = min((r for r in report.decodes if r.length == most), key=lambda r: r.batch)
        evicted = [row for row in decode_rows(result) if row.run.role == "evicted"]
        if evicted:
            return _speed(result, evicted)
    rows = [(p.length, row) for p in report.prompts for row in compaction_rows(p)]
    if not rows:
        return NO_RESULTS
    length, row = min(rows, key=lambda pair: (-pair[0], pair[1].live_share))
    return (
        f"At {count(length)} prompt tokens {row.compaction.setting} leaves"
        f" {_percent(row.live_share)} of the K/V bytes; no decoding was measured."
    )


def _scores(block: Block) -> str:
    task, words = block.over_all, f"On {count(block.length)}-token prompts"
    words += ", query-agnostic," if block.protocol == "agnostic" else ""
    full = block.full(task)
    evicted = [s for s in block.of(task) if s.setting.policy != NONE]
    # Of the same number of examples, all of which the full cache has answered: the same ones.
    compared = [
        s
        for s in evicted
        if full is not None and s.exact is not None and s.score.count == full.score.count
    ]
    if full is None or not compared:
        if full is not None and not evicted:
            value = f"{full.score.mean:.2f} over {_examples(full, block)}"
            return f"{words} the full cache scores {value}; nothing was evicted."
        return f"{words} no setting has answered the same examples as the full cache yet."
    names = {s.setting.budget for s in compared}
    budget = next(name for name in block.budgets if name in names)
    rivals = [s for s in compared if s.setting.budget == budget]
    best = max(rivals, key=lambda s: s.score.mean)
    among = f", the best of {len(rivals)} settings" if len(rivals) > 1 else ""
    value = best.score
    return (
        f"{words} with {_percent(best.rows)} of the rows {best.setting.name} scores"
        f" {value.mean:.2f} (95 % interval {value.low:.2f} – {value.high:.2f}){among}; the full"
        f" cache scores {full.score.mean:.2f}, over {_examples(full, block)}."
    )


def _fidelity(found: Stretches) -> str:
    if not found.evicted:
        return f"{found.words}: nothing was evicted."
    budget = found.budgets[0]
    rivals = [s for s in found.evicted if s.setting.budget == budget]
    best = min(rivals, key=lambda s: s.kl.mean)
    among = f", the closest of {len(rivals)} settings," if len(rivals) > 1 else ""
    return (
        f"{found.words}: with {_percent(best.rows)} of the rows {best.setting.name}{among} names"
        f" the same most likely token as the exact cache at {_percent(best.agreement.mean)} of the"
        f" positions, with a KL divergence of {best.kl.mean:.4f} nats and"
        f" {best.perplexity / best.exact_perplexity:.3f} × its perplexity."
    )


def _speed(result: DecodeResult, evicted: Sequence[DecodeRow]) -> str:
    def ratio(row: DecodeRow) -> Spread:
        assert row.against_exact is not None
        return row.against_exact

    best = max(evicted, key=lambda row: ratio(row).median)
    bound = next(row for row in decode_rows(result) if row.run is result.bound_of(best.run))
    among = f", the fastest of {len(evicted)} settings" if len(evicted) > 1 else ""
    share = best.run.live_nbytes / result.exact.live_nbytes
    return (
        f"At {count(result.length)} prompt tokens, {batch_words(result.batch)}: {best.run.name}"
        f" decodes {spread_words(ratio(best), '{:.2f}')} times as fast as the exact cache, with"
        f" {_percent(share)} of its K/V bytes{among}; a stock cache of as many rows reaches"
        f" {spread_words(ratio(bound), '{:.2f}')} times."
    )


def _examples(full: TaskSummary, block: Block) -> str:
    tasks = f" of {len(block.tasks) - 1} tasks" if full.task == ALL_TASKS else f" of {full.task}"
    number = full.score.count
    return f"{count(number)} example{'s' if number != 1 else ''}{tasks}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def _length(block: Block) -> int:
    return block.length
