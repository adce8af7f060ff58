"""Tables of evaluation results: scores by task, setting and budget; divergence by setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from kvkeep.evaluation import (
    ALL_TASKS,
    NONE,
    FidelitySummary,
    HarnessRecord,
    Interval,
    Summary,
    TaskSummary,
)

_PROTOCOLS = {
    "aware": "the question is compressed with the document",
    "agnostic": "the question comes after the document was compressed",
}


def tables(summary: Summary) -> Iterator[tuple[str, Table, str]]:
    """One table per protocol and length of tasks, one per text and length, one per harness task.

    Yields:
        (title, table, caption): a table would fold both to its own width.
    """
    blocks = dict.fromkeys((s.protocol, s.length) for s in summary.tasks)
    for protocol, length in blocks:
        yield _scores(
            protocol,
            length,
            [s for s in summary.tasks if (s.protocol, s.length) == (protocol, length)],
        )
    pieces = dict.fromkeys((s.text, s.length, s.continuation) for s in summary.fidelity)
    for piece in pieces:
        yield _fidelity(
            [s for s in summary.fidelity if (s.text, s.length, s.continuation) == piece]
        )
    for task in dict.fromkeys(record.task for record in summary.harness):
        yield _harness([record for record in summary.harness if record.task == task])


def _scores(protocol: str, length: int, summaries: Sequence[TaskSummary]) -> tuple[str, Table, str]:
    budgets = list(dict.fromkeys(s.setting.budget for s in summaries if s.setting.policy != NONE))
    title = f"{length:,} tokens, {protocol}: {_PROTOCOLS[protocol]}"
    table = _table()
    table.add_column("task", no_wrap=True)
    table.add_column("setting")
    for budget in budgets or [""]:
        table.add_column(budget or "score", justify="right", no_wrap=True)
    for task in dict.fromkeys(s.task for s in summaries):
        if task == ALL_TASKS:
            table.add_section()
        shown = task
        rows: dict[str, dict[str, str]] = {}
        for s in (s for s in summaries if s.task == task):
            name = "full cache" if s.setting.policy == NONE else s.setting.name
            cells = rows.setdefault(name, {})
            for budget in (budgets or [""]) if s.setting.policy == NONE else [s.setting.budget]:
                cells[budget] = _interval(s.score)
        for name, cells in rows.items():
            table.add_row(shown, name, *(cells.get(budget, "") for budget in budgets or [""]))
            shown = ""
    return title, table, "mean score of the examples (95 % interval)"


def _fidelity(summaries: Sequence[FidelitySummary]) -> tuple[str, Table, str]:
    first = summaries[0]
    title = (
        f"{first.text}: {first.continuation:,} tokens after {first.length:,},"
        " against the exact cache"
    )
    table = _table()
    for name in ("setting", "budget"):
        table.add_column(name)
    for name in ("KL, nats", "same top token", "perplexity"):
        table.add_column(name, justify="right")
    for s in summaries:
        table.add_row(
            "full cache" if s.setting.policy == NONE else s.setting.name,
            s.setting.budget,
            f"{s.kl.mean:.4f}",
            f"{100 * s.agreement.mean:.1f}%",
            f"{s.perplexity:.2f}",
        )
    return title, table, f"mean over {first.kl.count} stretches of the text"


def _harness(records: Sequence[HarnessRecord]) -> tuple[str, Table, str]:
    first = records[0]
    limit = "all examples" if first.limit is None else f"examples: at most {first.limit:,}"
    table = _table()
    for name in ("setting", "budget"):
        table.add_column(name)
    names = list(dict.fromkeys(name for record in records for name in record.metrics))
    for name in names:
        table.add_column(name.removesuffix(",none"), justify="right")
    for r in records:
        shown = "full cache" if r.policy == NONE else r.setting.name
        values = (f"{r.metrics[name]:.4f}" if name in r.metrics else "" for name in names)
        table.add_row(shown, r.budget, *values)
    return f"{first.task} of lm-evaluation-harness {first.lm_eval}", table, limit


def _interval(value: Interval) -> str:
    return f"{value.mean:.2f} ({value.low:.2f}–{value.high:.2f})"


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
