"""Reports: nothing of their data runs, and what readers and machines need is there."""

from __future__ import annotations

import dataclasses
import html
import itertools
import re
from typing import Any

import pytest

from bench_reports import RAGGED, SPAN, a_decode, a_model, a_prompt, a_report
from kvkeep.bench import Setting
from kvkeep.pages import TextTable, html_table, markdown_table, markdown_text
from kvkeep.reports import (
    Origin,
    bench_page,
    bench_picture,
    eval_markdown,
    eval_page,
    eval_picture,
    standalone,
)
from report_results import (
    NASTY,
    Elements,
    some_fidelity,
    some_results,
    some_tasks,
)

ORIGIN = Origin("2026-11-30 12:00 UTC", "kvkeep eval --show a.jsonl")


# -- what nobody may break -----------------------------------------------------------------


def nasty_pages() -> list[str]:
    records = [
        dataclasses.replace(r, options={"x": NASTY}) if r.policy == "span" else r
        for r in some_tasks()
    ]
    records = [
        dataclasses.replace(r, task=NASTY + r.task, budget=NASTY if r.budget == "5%" else r.budget)
        for r in records
    ]
    texts = [dataclasses.replace(r, text_name=NASTY) for r in some_fidelity()]
    header: dict[str, Any] = dict.fromkeys(("model_name", "device", "prose", "platform"), NASTY)
    results = some_results(*records, *texts, **header)
    setting = Setting(NASTY, "25%", "uniform", NASTY)
    decode, prompt = a_decode(), a_prompt()
    runs = tuple(
        dataclasses.replace(run, setting=setting if run.setting == SPAN else run.setting)
        for run in decode.runs
    )
    compactions = tuple(
        dataclasses.replace(c, setting=setting if c.setting != RAGGED else RAGGED)
        for c in prompt.compactions
    )
    report = a_report(
        dataclasses.replace(prompt, compactions=compactions), dataclasses.replace(decode, runs=runs)
    )
    report = dataclasses.replace(report, model=a_model(name=NASTY, identity=NASTY))
    origin = Origin(NASTY, NASTY)
    return [
        eval_page(results, origin),
        bench_page(report, origin),
        drawn(eval_picture(results)),
        drawn(bench_picture(report)),
    ]


def drawn(picture: Any) -> str:
    return standalone(picture.charts, picture.title, picture.foot)


def test_nothing_of_the_data_runs() -> None:
    plain = {tag for tag, _ in Elements(eval_page(some_results(), ORIGIN)).elements}
    plain |= {tag for tag, _ in Elements(bench_page(a_report(), ORIGIN)).elements}
    for text in nasty_pages():
        assert html.escape(NASTY, quote=True) in text
        elements = Elements(text).elements
        assert {tag for tag, _ in elements} <= plain
        assert "script" not in {tag for tag, _ in elements} and "<script" not in text
        for _, attributes in elements:
            assert not [name for name in attributes if name.startswith("on") or name == "style"]


def test_markdown_shows_names_as_they_are() -> None:
    told = eval_markdown(some_results(*(dataclasses.replace(r, task=NASTY) for r in some_tasks())))
    assert "<script" not in told and "<img" not in told
    for line in told.splitlines():
        if line.startswith("|"):
            shape = re.sub(r"\\.", "", line).count("|")
            assert shape in (5, 6)
    assert markdown_text("a\nb <i>*c*`d`|") == r"a b &lt;i>\*c\*\`d\`|"
    table = TextTable("t", ("a|b", "c"), (("x\\|y", "1"),))
    assert markdown_table(table) == ["| a\\|b | c |", "| --- | ---: |", "| x\\\\\\|y | 1 |"]


def test_tables_have_headers_with_their_scope() -> None:
    table = html_table(TextTable("<t>", ("a", "b"), (("x", "1"), ("y", "2")), "note"))
    headers = [dict(a)["scope"] for tag, a in Elements(table).elements if tag == "th"]
    assert headers == ["col", "col", "row", "row"]
    assert "&lt;t&gt;" in table and "<t>" not in table


@pytest.mark.parametrize("page", ["eval", "bench"])
def test_every_picture_has_a_name_and_a_description(page: str) -> None:
    text = eval_page(some_results(), ORIGIN) if page == "eval" else bench_page(a_report(), ORIGIN)
    elements = Elements(text).elements
    ids = [a["id"] for _, a in elements if "id" in a]
    assert len(set(ids)) == len(ids)
    pictures = [a for tag, a in elements if tag == "svg" and "aria-hidden" not in a]
    assert len(pictures) > 4
    for attributes in pictures:
        assert attributes["role"] == "img" and attributes["aria-label"]
        assert attributes["aria-describedby"] in ids
    described = re.findall(r"<desc id=[^>]*>([^<]+)</desc>", text)
    assert len(described) == len(pictures) and all(len(words) > 30 for words in described)
    levels = [int(tag[1]) for tag, _ in elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    assert ("html", {"lang": "en"}) in elements


def test_a_page_is_the_same_every_time() -> None:
    assert eval_page(some_results(), ORIGIN) == eval_page(some_results(), ORIGIN)
    assert bench_page(a_report(), ORIGIN) == bench_page(a_report(), ORIGIN)


def test_the_command_names_no_folders() -> None:
    origin = Origin.now(
        ["eval", "--model", "/home/me/models/tiny", "--text=/home/me/a b.txt", "--policies", "span",
         "--show", "../x/a.jsonl", "--report", "owner/name"]
    )  # fmt: skip
    assert origin.command == (
        "kvkeep eval --model tiny '--text=a b.txt' --policies span --show a.jsonl"
        " --report owner/name"
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", origin.made)
    page = eval_page(some_results(model_name="/home/me/models/tiny"), ORIGIN)
    assert "/home" not in page and "kvkeep eval: tiny" in page
