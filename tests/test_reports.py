"""Reports without a browser: their figures are those of the results, and nothing of them runs."""

from __future__ import annotations

import dataclasses
import html
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_reports import a_decode, a_prompt, a_report
from kvkeep.bench import BenchReport, Setting, decode_rows
from kvkeep.errors import OutputError
from kvkeep.evaluation import ALL_TASKS, NONE, Results, summarise
from kvkeep.reports import (
    Origin,
    bench_headline,
    bench_page,
    bench_picture,
    eval_headline,
    eval_markdown,
    eval_page,
    eval_picture,
)
from kvkeep.reports.divergence import bin_edges, binned, curve_charts, kl_chart, stretches
from kvkeep.reports.scores import blocks, budget_places, score_chart, setting_styles, turn_charts
from kvkeep.reports.speed import decoded, kind_styles, speed_charts
from report_results import (
    BUDGETS,
    SCORES,
    Elements,
    a_header,
    a_task,
    cells,
    some_fidelity,
    some_harness,
    some_results,
    some_tasks,
)

ORIGIN = Origin("2026-11-30 12:00 UTC", "kvkeep eval --show a.jsonl")

GOLDEN = """\
# kvkeep eval

demo, float32, cpu, Some CPU; kvkeep 0.1.0, mlx 0.32.4, mlx-lm 0.32.2; seed 3

On 1,000-token prompts with 10 % of the rows span scores 0.50 (95 % interval 0.19 – 0.81), the best of 2 settings; the full cache scores 1.00, over 6 examples of 2 tasks.

## 1,000 tokens, query-aware: the question is compressed with the document

| setting | 10% | 50% |
| --- | ---: | ---: |
| full cache | 1.00 (0.61 – 1.00) | 1.00 (0.61 – 1.00) |
| span | 0.50 (0.19 – 0.81) | 1.00 (0.61 – 1.00) |
| knorm, adaptive, window=8 | 0.00 (0.00 – 0.39) | – |

Means over 6 examples of 2 tasks, with 95 % intervals (Wilson).

## 1,000 tokens, aware, budget 10%, by task

| task | full cache | span | knorm, adaptive, window=8 |
| --- | ---: | ---: | ---: |
| needle-prose | 1.00 | 1.00 | 0.00 |
| multi-key | 1.00 | 0.00 | 0.00 |
| all tasks | 1.00 | 0.50 | 0.00 |

## 1,000 tokens, aware, budget 50%, by task

| task | full cache | span | knorm, adaptive, window=8 |
| --- | ---: | ---: | ---: |
| needle-prose | 1.00 | 1.00 | – |
| multi-key | 1.00 | 1.00 | – |
| all tasks | 1.00 | 1.00 | – |
"""  # noqa: E501


# -- evaluations ---------------------------------------------------------------------------


def test_the_page_shows_the_summary() -> None:
    results = some_results(*some_tasks(), *some_fidelity(), *some_harness())
    summary = summarise(results.records)
    page = eval_page(results, ORIGIN)
    main, each, *_ = Elements(page).tables
    assert main[0] == ["setting", *BUDGETS]
    for s in (s for s in summary.tasks if s.task == ALL_TASKS):
        shown = f"{s.score.mean:.2f} ({s.score.low:.2f} – {s.score.high:.2f})"
        if s.setting.policy == NONE:
            assert cells(main)["full cache"] == [shown] * 4
        else:
            assert cells(main)[s.setting.policy][list(BUDGETS).index(s.setting.budget)] == shown
    for policy, scores in SCORES.items():
        assert [float(cell[:4]) for cell in cells(main)[policy]] == list(scores)
    by_task = {(row[0], row[1]): row[2:] for row in each}
    for s in (s for s in summary.tasks if s.setting.policy != NONE):
        row = by_task[s.task, s.setting.policy]
        assert float(row[list(BUDGETS).index(s.setting.budget)][:4]) == round(s.score.mean, 2)
        assert row[-1] == str(s.score.count)
    text = html.unescape(page)
    for s in summary.fidelity:
        assert f"{s.kl.mean:.4f}" in text and f"{s.perplexity:.2f}" in text
    assert "0.4000" in text and "hellaswag" in text
    for fact in ("llama:00", "float32", "Some CPU", "mlx-lm 0.32.2", ORIGIN.made, ORIGIN.command):
        assert fact in text
    assert html.escape(eval_headline(summary)) in page


def test_a_chart_holds_what_its_table_holds() -> None:
    (block,) = blocks(summarise(some_tasks()))
    chart = score_chart(block, ALL_TASKS, setting_styles(summarise(some_tasks())))
    assert [line.name for line in chart.lines] == list(SCORES)
    for line in chart.lines:
        assert [point.y for point in line.points] == list(SCORES[line.name])
        assert [point.at for point in line.points] == list(BUDGETS)
        assert [point.x for point in line.points] == pytest.approx(list(BUDGETS.values()))
        for point in line.points:
            assert point.low is not None and point.high is not None
            assert point.low <= point.y <= point.high
    (level,) = chart.levels
    assert (level.name, level.y) == ("full cache", 1.0)
    assert [row[0] for row in chart.table.rows] == list(BUDGETS)
    assert chart.table.rows[0][2].startswith("0.25 (")
    for line in chart.lines:
        assert all(f"{point.at} {point.told}" in chart.described for point in line.points)


def test_scores_per_turn() -> None:
    turns = {"none": (1.0, 1.0, 1.0), "span": (1.0, 0.5, 0.0)}
    records = [
        a_task("multi-turn", index, policy, budget, turns[policy])
        for policy, budget in (("none", "100%"), ("span", "25%"))
        for index in range(2)
    ]
    summary = summarise(records)
    (chart,) = turn_charts(blocks(summary)[0], setting_styles(summary))
    assert chart.title == "multi-turn, budget 25%"
    shown = {line.name: [point.y for point in line.points] for line in chart.lines}
    assert shown == {"full cache": [1, 1, 1], "span": [1, 0.5, 0]}
    assert chart.table.rows[1][0] == "2"
    summary = summarise(some_tasks()[:1])
    assert not list(turn_charts(blocks(summary)[0], {}))


def test_protocols_and_lengths_stand_apart() -> None:
    parts = blocks(summarise([*some_tasks(), *some_tasks(protocol="agnostic", length=4000)]))
    assert [(b.protocol, b.length) for b in parts] == [("aware", 1000), ("agnostic", 4000)]
    headline = eval_headline(
        summarise([*some_tasks(length=2000), *some_tasks(), *some_tasks(protocol="agnostic")])
    )
    assert "2,000-token prompts with 5 %" in headline  # the longest of each
    assert "1,000-token prompts, query-agnostic," in headline


def test_budgets_of_any_unit_lie_by_the_rows_they_leave() -> None:
    records = [a_task("a", 0, "none", "100%", (1.0,))]
    for budget, rows in (("64MB", 400), ("512", 512), ("10%", 100)):
        records.append(a_task("a", 0, "span", budget, (0.5,), rows=rows))
    (block,) = blocks(summarise(records))
    assert block.budgets == ["10%", "64MB", "512"]
    assert budget_places(block) == {"10%": 0.1, "64MB": 0.4, "512": 0.512}
    near = [dataclasses.replace(records[2], rows=399), *records]
    near[0] = dataclasses.replace(near[0], budget="63MB")
    (block,) = blocks(summarise(near))
    places = budget_places(block)
    assert [places[name] for name in block.budgets] == [1, 2, 4, 8]  # two would meet


def test_an_interrupted_run_makes_an_honest_page() -> None:
    records = some_tasks()
    half = records[:-20]
    page = html.unescape(eval_page(some_results(*half), ORIGIN))
    assert "not every setting answered all" in page
    assert "these averages are of different questions" in page
    whole = html.unescape(eval_page(some_results(*records), ORIGIN))
    assert 'class="note"' not in whole
    assert "**1,000 tokens" in eval_markdown(some_results(*half))
    # Settings that did not answer what the full cache did are not compared in the headline.
    full = [r for r in records if r.policy == NONE]
    span = [r for r in records if r.policy == "span" and r.budget == "5%"][:-1]
    assert "no setting has answered the same examples" in eval_headline(summarise([*full, *span]))
    assert "nothing was evicted" in eval_headline(summarise(full))
    without = [r for r in records if r.policy != NONE]
    told = html.unescape(eval_page(some_results(*without), ORIGIN))
    assert "the full cache was not asked" in told and "no setting has answered" in told


def test_a_combination_that_was_not_run_is_told() -> None:
    records = [r for r in some_tasks() if (r.policy, r.budget) != ("span", "50%")]
    page = eval_page(some_results(*records), ORIGIN)
    assert "1 of 12 settings have no result" in page
    assert cells(Elements(page).tables[0])["span"][-1] == "–"


def test_empty_results_make_an_empty_page() -> None:
    results = Results(a_header(), ())
    page = eval_page(results, ORIGIN)
    assert "There are no results yet." in page and "<svg" not in page and "llama:00" in page
    assert "There are no results yet." in eval_markdown(results)
    with pytest.raises(OutputError, match="nothing to draw"):
        eval_picture(results)
    harness = some_results(*some_harness())
    assert "lm-evaluation-harness" in eval_headline(summarise(harness.records))


def test_markdown_letter_by_letter() -> None:
    records = []
    for index, task in itertools.product(range(3), ("needle-prose", "multi-key")):
        records.append(a_task(task, index, "none", "100%", (1.0,)))
        first = float(task == "needle-prose")
        records.append(a_task(task, index, "span", "10%", (first,)))
        records.append(a_task(task, index, "span", "50%", (1.0,)))
        other = {"allocation": "adaptive", "options": {"window": 8}}
        records.append(a_task(task, index, "knorm", "10%", (0.0,), **other))
    told = eval_markdown(some_results(*records))
    assert "**1,000 tokens, query-aware" in told  # one combination is missing
    kept = [part for part in told.split("\n\n") if not part.startswith("**")]
    assert "\n\n".join(kept) == GOLDEN


def test_markdown_of_a_text_and_of_the_harness() -> None:
    told = eval_markdown(some_results(*some_fidelity(stretches=1), *some_harness()))
    assert "## a text.txt: 64 tokens after 1,000" in told
    assert "| span 50% | 0.0741 | 95.0% | 7.96 | 1.077 | 50.1% |" in told
    assert "One stretch of the text: no interval can be told." in told
    assert "| setting | acc | acc_stderr |" in told


# -- divergence ----------------------------------------------------------------------------


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=200), st.integers(1, 64))
def test_bins_are_means_of_neighbours(values: list[float], bins: int) -> None:
    edges = bin_edges(len(values), bins)
    assert (edges[0], edges[-1]) == (0, len(values))
    widths = np.diff(edges)
    assert widths.min() >= 1 and widths.max() - widths.min() <= 1
    assert len(widths) == min(len(values), bins)
    total = sum(w * v for w, v in zip(widths, binned(values, bins), strict=True))
    assert total == pytest.approx(math.fsum(values), abs=1e-9)


def test_curves_over_the_position() -> None:
    summary = summarise(some_fidelity(continuation=8))
    (found,) = stretches(summary)
    styles = setting_styles(summary)
    charts = {chart.title: chart for chart in curve_charts(found, styles)}
    assert len(charts) == 6
    kl = charts["KL divergence, budget 10%"].lines[0]
    span = next(s for s in summary.fidelity if s.setting.policy == "span")
    assert [p.y for p in kl.points] == pytest.approx(span.kl_curve)
    assert [p.x for p in kl.points] == list(range(1, 9))
    ratio = charts["Perplexity ratio, budget 10%"]
    assert [p.y for p in ratio.lines[0].points] == pytest.approx(np.exp(span.loss_curve))
    assert ratio.levels[0].y == 1 and ratio.y.low <= 1
    assert kl.style == charts["KL divergence, budget 50%"].lines[0].style
    by_budget = kl_chart(found, styles)
    assert by_budget.lines[0].points[0].y == pytest.approx(span.kl.mean)
    assert [tick[1] for tick in by_budget.x.ticks] == ["10%", "50%"]


# -- benchmarks ----------------------------------------------------------------------------


def test_speed_is_what_the_rounds_say() -> None:
    report = a_report(a_prompt(), a_decode(batch=1), a_decode(batch=2))
    found = decoded(report)
    assert [(one.batch, one.budget) for one in found] == [
        (1, "25%"), (1, "512"), (2, "25%"), (2, "512"),
    ]  # fmt: skip
    chart = next(iter(speed_charts(found, kind_styles(report))))
    rows = {row.run.name: row for row in decode_rows(report.decodes[0])}
    bound, span = chart.lines
    assert (bound.name, span.name) == ("bound", "span, auto")
    spread = rows["span 25%, auto"].against_exact
    assert spread is not None
    (point,) = span.points
    assert (point.x, point.y, point.low, point.high) == (
        2048, spread.median, spread.median_low, spread.median_high,
    )  # fmt: skip
    assert bound.points[0].y == 4.0  # of 2, 4 and 8 times 1 s
    assert chart.levels[0].y == 1
    page = html.unescape(bench_page(report, ORIGIN))
    assert bench_headline(report) in page and point.told in page
    for title in ("Decode speed", "Bytes of the cache", "Prefill time", "Peak memory of decoding"):
        assert title in page
    for figure in ("94.0", "23.5", "1.100 (1.000 – 1.100)", "910.0"):
        assert figure in page


def test_the_bench_headline() -> None:
    told = bench_headline(a_report(a_prompt(), a_decode(batch=1)))
    assert told.startswith("At 2,048 prompt tokens, 1 request: span 25%, auto decodes 2.00 (2.00 –")
    assert "25 % of its K/V bytes, the fastest of 2 settings" in told and "4.00 (2.00" in told
    assert "no decoding was measured" in bench_headline(a_report(a_prompt()))
    empty = BenchReport(a_report().device, a_report().model)
    assert bench_headline(empty) == "There are no results yet."
    alone = dataclasses.replace(a_decode(), runs=a_decode().runs[:1])
    assert bench_headline(a_report(alone)) == "There are no results yet."
    for report in (empty, a_report(a_prompt(read=False)), a_report(alone)):
        assert "<main>" in bench_page(report, ORIGIN)
    for report in (empty, a_report(alone)):
        with pytest.raises(OutputError, match="nothing to draw"):
            bench_picture(report)


def test_of_two_measurements_the_later_one_is_drawn_and_both_are_listed() -> None:
    later = dataclasses.replace(
        a_decode(),
        runs=tuple(dataclasses.replace(run, seconds=(1.0, 1.0, 1.0)) for run in a_decode().runs),
    )
    report = a_report(a_decode(), later)
    chart = next(iter(speed_charts(decoded(report), kind_styles(report))))
    assert [line.points[0].y for line in chart.lines] == [1, 1]
    assert bench_page(report, ORIGIN).count("Table: Decode, T 2,048") == 2


def test_the_bound_is_that_of_the_fewest_rows() -> None:
    union = Setting("span", "25%", "uniform", "union")
    exact, bound, span, _ = a_decode().runs
    wide = dataclasses.replace(bound, rows=900, seconds=(1.9, 1.9, 1.9))
    more = dataclasses.replace(span, setting=union, rows=900)
    for runs in ((exact, bound, wide, span, more), (exact, wide, bound, more, span)):
        report = a_report(dataclasses.replace(a_decode(), runs=runs))
        (found,) = decoded(report)
        assert found.bound[2048].run == bound
        (chart,) = speed_charts([found], kind_styles(report))
        assert sorted(line.name for line in chart.lines) == ["bound", "span, auto", "span, union"]


def test_a_busy_machine_is_noted() -> None:
    assert "The machine was busy" in bench_page(a_report(load=9.0), ORIGIN)
    assert "The machine was busy" not in bench_page(a_report(), ORIGIN)
