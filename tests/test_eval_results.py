"""Results files: what is foreign or damaged is refused, and what summaries say of the records."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import EvaluationError
from kvkeep.evaluation import (
    ALL_TASKS,
    FidelityRecord,
    Header,
    Record,
    ResultsFile,
    TaskRecord,
    header_of,
    read_results,
    summarise,
)
from kvkeep.evaluation.plain import as_plain, from_plain
from kvkeep.evaluation.summaries import normal, wilson
from tiny_models import tiny_llama

HEADER = header_of(tiny_llama(), name="tiny", seed=3, prose="abc")


def task(
    name: str = "needle-prose",
    index: int = 0,
    score: float = 1.0,
    policy: str = "none",
    budget: str = "100%",
    protocol: str = "aware",
    length: int = 1000,
    **more: Any,
) -> TaskRecord:
    return TaskRecord(
        task=name,
        version=1,
        index=index,
        example_seed=7,
        length=length,
        protocol=protocol,
        policy=policy,
        budget=budget,
        allocation="uniform",
        store="auto",
        options={},
        prompt_tokens=990,
        compressed_tokens=900,
        rows=900 if policy == "none" else 225,
        kv_bytes=4000 if policy == "none" else 1000,
        exact_kv_bytes=4000,
        score=score,
        turn_scores=(score,),
        answers=("a",),
        expected=(("a", "b"),),
        **more,
    )


def fidelity(index: int = 0, kl: tuple[float, ...] = (0.5, 1.5), **more: Any) -> FidelityRecord:
    return FidelityRecord(
        **{
            "text": "digest",
            "text_name": "a.txt",
            "index": index,
            "length": 1000,
            "continuation": 2,
            "policy": "snapkv",
            "budget": "25%",
            "allocation": "uniform",
            "store": "auto",
            "options": {"window": 8, "cross": True, "gamma": 1.5, "pooling": "max"},
            "compressed_tokens": 1000,
            "rows": 250,
            "kv_bytes": 25,
            "exact_kv_bytes": 100,
            "kl": sum(kl) / 2,
            "agreement": 0.5,
            "perplexity": math.exp(2.0),
            "exact_perplexity": math.exp(1.0),
            "kl_curve": kl,
            "agreement_curve": (1, 0),
            "loss_curve": (1.0, 3.0),
            "exact_loss_curve": (0.5, 1.5),
            **more,
        }
    )


def written(path: Path, *records: Record, header: Header = HEADER) -> bytes:
    with ResultsFile(path, header) as file:
        for record in records:
            file.add(record)
    return path.read_bytes()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.jsonl"
    records = (task(seconds={"decode": 1.5}), task(index=1), fidelity())
    data = written(path, *records)
    results = read_results(path)
    assert results.header == HEADER
    assert results.records == records
    with ResultsFile(path, HEADER) as file:
        assert records[0].key in file
        assert task(index=2).key not in file
    assert path.read_bytes() == data
    assert [p.name for p in path.parent.iterdir()] == ["a.jsonl"]


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with ResultsFile(path, HEADER):
        with pytest.raises(EvaluationError, match="another run is writing"):
            ResultsFile(path, HEADER)
        assert read_results(path).records == ()
    assert written(path, task()).endswith(b"}\n")


@pytest.mark.parametrize("cut", range(1, 40, 7))
def test_a_half_written_line_is_dropped_and_written_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.jsonl"
    data = written(path, task(), task(index=1))
    path.write_bytes(data[:-cut])
    assert read_results(path).records == (task(),)
    assert path.read_bytes() == data[:-cut]  # reading leaves it alone
    assert written(path, task(index=1)) == data


OTHERS: dict[str, Any] = {
    "schema": "another schema",
    "schema_version": 2,
    "model": "llama:0",
    "kvkeep": "9.9",
    "mlx": "9.9",
    "mlx_lm": "9.9",
    "transformers": "9.9",
    "device": "gpu, other",
    "dtype": "bfloat16",
    "seed": 4,
    "prose": "abcd",
    "prefill_step": 64,
    "tasks": {**HEADER.tasks, "multi-key": 99},
}
TOLD = {"model_name": "./demo", "python": "3.99", "platform": "elsewhere"}


@pytest.mark.parametrize("field", OTHERS)
def test_a_file_of_another_run_is_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "a.jsonl"
    other = dataclasses.replace(HEADER, **{field: OTHERS[field]})
    path.write_text(json.dumps(as_plain(other)) + "\n" + json.dumps(as_plain(task())) + "\n{")
    data = path.read_bytes()
    with pytest.raises(EvaluationError, match=r"--output") as caught:
        ResultsFile(path, HEADER)
    if not field.startswith("schema"):
        assert f"another {field}" in str(caught.value)
        assert str({"multi-key": 99} if field == "tasks" else OTHERS[field]) in str(caught.value)
    assert path.read_bytes() == data


def test_where_it_ran_is_told_and_may_change(tmp_path: Path) -> None:
    assert {*OTHERS, *TOLD} == {field.name for field in dataclasses.fields(Header)}
    path = tmp_path / "a.jsonl"
    written(path, task(), header=dataclasses.replace(HEADER, **TOLD))
    written(path, task(index=1))
    assert len(read_results(path).records) == 2
    assert read_results(path).header.platform == "elsewhere"


def lines_of(*records: Record) -> list[str]:
    return [json.dumps(as_plain(value)) for value in (HEADER, *records)]


def without(line: str, name: str) -> str:
    values = json.loads(line)
    del values[name]
    return json.dumps(values)


def changed(line: str, **values: Any) -> str:
    return json.dumps({**json.loads(line), **values})


HEAD, LINE = lines_of(task())
DAMAGED: dict[str, tuple[str, str]] = {
    "an empty file": ("", "no results file"),
    "text": ("Dear reader,\n", "no results file"),
    "bytes": ("\x00\x01", "no results file"),
    "another JSON": ('{"a": 1}\n', "no results file"),
    "a list": ("[1]\n", "no results file"),
    "a half header": (HEAD[:-9], "no results file"),
    "no header": (f"{LINE}\n", "no results file"),
    "a header without a field": (f"{without(HEAD, 'mlx')}\n", "without the field 'mlx'"),
    "a header of wrong types": (changed(HEAD, seed="3") + "\n", "seed='3'"),
    "a broken line": (f"{HEAD}\n{LINE[:40]}\n{LINE}\n", "line 2"),
    "an empty line": (f"{HEAD}\n{LINE}\n\n", "line 3"),
    "another kind": (f"{HEAD}\n{changed(LINE, kind='song')}\n", "unknown kind 'song'"),
    "a missing field": (f"{HEAD}\n{without(LINE, 'score')}\n", "without the field 'score'"),
    "an unknown field": (f"{HEAD}\n{changed(LINE, colour=1)}\n", "unknown field 'colour'"),
    "a text for a number": (f"{HEAD}\n{changed(LINE, score='1')}\n", "score='1'"),
    "a truth for a number": (f"{HEAD}\n{changed(LINE, rows=True)}\n", "rows=True"),
    "not a number": (f"{HEAD}\n{changed(LINE, score=math.nan)}\n", "score=nan"),
    "a flat list": (f"{HEAD}\n{changed(LINE, expected=['a'])}\n", "expected='a'"),
    "a list of options": (f"{HEAD}\n{changed(LINE, options=[])}\n", r"options=\[\]"),
    "the same twice": (f"{HEAD}\n{LINE}\n{LINE}\n", "two records"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_no_results_file_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    text, message = DAMAGED[name]
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    openers: list[Callable[[], object]] = [
        lambda: read_results(path),
        lambda: ResultsFile(path, HEADER),
    ]
    for opened in openers:
        with pytest.raises(EvaluationError, match=message):
            opened()
    assert path.read_text() == text


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="cannot read"):
        read_results(tmp_path / "none.jsonl")
    (tmp_path / "plain").write_text("")
    for place in (tmp_path, tmp_path / "plain" / "a.jsonl"):
        with pytest.raises(EvaluationError, match="cannot"):
            ResultsFile(place, HEADER)


numbers = st.floats(allow_nan=False, allow_infinity=False)
options = st.dictionaries(st.text(), st.one_of(st.text(), st.integers(), numbers, st.booleans()))


@given(
    seconds=st.dictionaries(st.text(), numbers),
    given_options=options,
    answers=st.lists(st.text()).map(tuple),
    expected=st.lists(st.lists(st.text()).map(tuple)).map(tuple),
    score=numbers,
)
def test_any_values_come_back(
    seconds: Any, given_options: Any, answers: Any, expected: Any, score: float
) -> None:
    record = dataclasses.replace(
        task(score=score, seconds=seconds),
        options=given_options,
        answers=answers,
        expected=expected,
    )
    text = json.dumps(as_plain(record), ensure_ascii=False, allow_nan=False)
    assert from_plain(TaskRecord, json.loads(text)) == record


# Means and intervals


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    # Newcombe (1998), table I, method 3.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_of_a_proportion(right: int, count: int, low: float, high: float) -> None:
    found = wilson([1.0] * right + [0.0] * (count - right))
    assert found.count == count
    assert found.mean == pytest.approx(right / count)
    assert found.low == pytest.approx(low, abs=6e-5)
    assert found.high == pytest.approx(high, abs=6e-5)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_intervals_hold_their_mean(values: list[float]) -> None:
    for interval in (wilson(values), normal(values)):
        assert interval.low - 1e-12 <= interval.mean <= interval.high + 1e-12
    assert 0 <= wilson(values).low <= wilson(values).high <= 1


def test_the_normal_interval() -> None:
    found = normal([1.0, 2.0, 3.0, 4.0])
    half = 1.959964 * math.sqrt((2.25 + 0.25 + 0.25 + 2.25) / 3 / 4)
    assert (found.mean, found.count) == (2.5, 4)
    assert [found.low, found.high] == pytest.approx([2.5 - half, 2.5 + half])
    assert normal([3.0]).low == normal([3.0]).high == 3.0
    for empty in (normal, wilson):
        with pytest.raises(ValueError, match="no values"):
            empty([])


def test_scores_are_summed_up_by_task_length_protocol_and_setting() -> None:
    records = [
        task("multi-key", index, score, policy, budget)
        for index in range(4)
        for policy, budget, score in (
            ("none", "100%", 1.0),
            ("span", "25%", float(index < 3)),
            ("span", "50%", 1.0),
        )
    ]
    records += [task("needle-filler", 0, 0.5), task("needle-filler", 0, 0.0, "span", "25%")]
    records += [task("multi-key", 0, 0.0, "span", "25%", "agnostic", 4000)]
    found = summarise(records)
    assert found.fidelity == ()
    where = [
        (s.protocol, s.length, s.task, s.setting.policy, s.setting.budget) for s in found.tasks
    ]
    assert where == [
        *[
            ("aware", 1000, name, policy, budget)
            for name in ("needle-filler", "multi-key", ALL_TASKS)
            for policy, budget in (("none", "100%"), ("span", "25%"), ("span", "50%"))
            if (name, budget) != ("needle-filler", "50%")
        ],
        ("agnostic", 4000, "multi-key", "span", "25%"),
    ]
    by_name = {(s.protocol, s.task, s.setting.budget): s for s in found.tasks}
    one = by_name["aware", "multi-key", "25%"]
    assert (one.score.mean, one.score.count, one.exact) == (0.75, 4, 1.0)
    assert (one.rows, one.nbytes) == (0.25, 0.25)
    assert by_name["aware", ALL_TASKS, "25%"].score.mean == pytest.approx(3 / 5)
    assert by_name["aware", ALL_TASKS, "25%"].exact == pytest.approx(4.5 / 5)
    assert by_name["agnostic", "multi-key", "25%"].exact is None


def test_divergences_are_summed_up_by_text_and_setting() -> None:
    records = [fidelity(0), fidelity(1, (1.5, 2.5)), fidelity(0, policy="none", options={})]
    found = summarise(records)
    assert found.tasks == ()
    one, full = found.fidelity
    assert (one.setting.policy, full.setting.policy) == ("snapkv", "none")
    assert (one.kl.mean, one.kl.count, full.kl.count) == (1.5, 2, 1)
    assert one.kl_curve == (1.0, 2.0)
    assert one.agreement_curve == (1.0, 0.0)
    assert one.loss_curve == (0.5, 1.5)
    assert one.perplexity == pytest.approx(math.exp(2.0))
    assert one.exact_perplexity == pytest.approx(math.exp(1.0))
    assert (one.rows, one.nbytes) == (0.25, 0.25)
