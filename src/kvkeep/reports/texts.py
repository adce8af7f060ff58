"""An evaluation as Markdown for a README."""

from __future__ import annotations

from kvkeep.evaluation import Results, summarise
from kvkeep.pages import TextTable, markdown_table, markdown_text
from kvkeep.reports.divergence import fidelity_table, stretches
from kvkeep.reports.harness import harness_tables
from kvkeep.reports.headlines import eval_headline
from kvkeep.reports.origin import eval_line
from kvkeep.reports.scores import blocks, missing_words, score_table, task_table


def eval_markdown(results: Results) -> str:
    """The headline, setting by budget, task by setting, and divergence from the exact cache."""
    summary = summarise(results.records)
    parts = ["# kvkeep eval", markdown_text(eval_line(results))]
    parts.append(markdown_text(eval_headline(summary)))
    for block in blocks(summary):
        parts += [f"**{markdown_text(words)}**" for words in missing_words(block)]
        parts += _table(score_table(block, block.over_all))
        if len(block.tasks) > 1:
            for budget in block.budgets:
                parts += _table(task_table(block, budget))
    for found in stretches(summary):
        parts += _table(fidelity_table(found))
    for table in harness_tables(summary):
        parts += _table(table)
    return "\n\n".join(parts) + "\n"


def _table(table: TextTable) -> list[str]:
    parts = [f"## {markdown_text(table.title)}", "\n".join(markdown_table(table))]
    return [*parts, markdown_text(table.note)] if table.note else parts
