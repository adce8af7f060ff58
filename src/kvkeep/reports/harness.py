"""Figures of lm-evaluation-harness as tables."""

from __future__ import annotations

from kvkeep.evaluation import NONE, Summary
from kvkeep.pages import TextTable, count
from kvkeep.reports.charts import NOTHING
from kvkeep.reports.scores import FULL_CACHE


def harness_tables(summary: Summary) -> list[TextTable]:
    """One per task: setting by measure, as the harness reports them."""
    shown = []
    keys = dict.fromkeys((r.task, r.lm_eval, r.limit, r.shots) for r in summary.harness)
    for task, version, limit, shots in keys:
        key = (task, version, limit, shots)
        records = [r for r in summary.harness if (r.task, r.lm_eval, r.limit, r.shots) == key]
        names = list(dict.fromkeys(name for r in records for name in r.metrics))
        rows = tuple(
            (
                FULL_CACHE if r.policy == NONE else f"{r.setting.name} {r.budget}",
                *(f"{r.metrics[n]:.4f}" if n in r.metrics else NOTHING for n in names),
            )
            for r in records
        )
        shots_words = "" if shots is None else f", {shots} shots"
        few = "All examples" if limit is None else f"At most {count(limit)} examples"
        shown.append(
            TextTable(
                f"{task} of lm-evaluation-harness {version}{shots_words}",
                ("setting", *(name.removesuffix(",none") for name in names)),
                rows,
                f"{few}; figures as the harness reports them.",
            )
        )
    return shown
