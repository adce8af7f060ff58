"""Results and their file: what goes in comes out, and nothing else is let in."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_reports import RAGGED, SPAN, a_decode, a_device, a_model, a_prompt, a_report
from kvkeep.bench import (
    BenchReport,
    DecodeRun,
    ResultsFile,
    Spread,
    as_lines,
    compaction_rows,
    decode_rows,
    prefill_rows,
    read_report,
    require_writable,
    write_text,
)
from kvkeep.errors import BenchFileError

Change = Callable[[list[dict[str, Any]]], object]


def edited(path: Path, change: Change) -> Path:
    """A file of the made-up report with something changed in its lines."""
    lines = [json.loads(line) for line in as_lines(a_report()).splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_report_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    for report in (
        a_report(),
        a_report(a_prompt(read=False), a_decode(), a_prompt()),
        BenchReport(a_device(kind="gpu"), a_model(synthetic="layers=4")),
    ):
        write_text(path, as_lines(report))
        assert read_report(path) == report


@given(
    seconds=st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=5),
    nbytes=st.integers(1, 2**62),
    text=st.text(st.characters(codec="utf-8"), min_size=1),
)
def test_every_figure_comes_back_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory, seconds: list[float], nbytes: int, text: str
) -> None:
    run = DecodeRun("exact", None, 5, tuple(seconds), nbytes, nbytes, nbytes)
    report = a_report(dataclasses.replace(a_decode(), runs=(run,)))
    report = dataclasses.replace(report, model=a_model(name=text))
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    write_text(path, as_lines(report))
    assert read_report(path) == report


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda lines: lines.clear(), 'a first line with "format"'),
        (lambda lines: lines[0].update(format="other"), 'a first line with "format"'),
        (lambda lines: lines[0].update(version=2), "version 1; got version 2"),
        (lambda lines: lines[0].pop("device"), "line 1.device"),
        (lambda lines: lines[0]["device"].update(cores="2"), "line 1.device.cores"),
        (lambda lines: lines[0]["device"].update(cores=True), "line 1.device.cores"),
        (lambda lines: lines[0]["device"].update(kind="tpu"), "one of cpu, gpu"),
        (lambda lines: lines[0]["model"].pop("dtype"), "dtype missing"),
        (lambda lines: lines[1].pop("kind"), "line 2 is no result"),
        (lambda lines: lines[1].update(kind="run"), "a kind of session, prompt, decode"),
        (lambda lines: lines.pop(1), "a result of no session"),
        (lambda lines: lines[3].update(batch=0), "batch below 1"),
        (lambda lines: lines[3].update(batch=1.5), "line 4.batch"),
        (lambda lines: lines[3].update(new=1), "new missing or too much"),
        (lambda lines: lines[3].update(runs={}), "line 4.runs"),
        (lambda lines: lines[3]["runs"].pop(0), "the exact run comes first"),
        (lambda lines: lines[3]["runs"].pop(1), "no bound of 512 rows"),
        (lambda lines: lines[3]["runs"][1]["seconds"].pop(), "rounds"),
        (lambda lines: lines[3]["runs"][1].update(seconds=[1, 0, 1]), "no clock or counter"),
        (lambda lines: lines[3]["runs"][1].update(seconds=[1, float("nan"), 1]), "no clock"),
        (lambda lines: lines[3]["runs"][2].update(setting=None), "belongs to evicted runs"),
        (lambda lines: lines[3]["runs"][2]["setting"].update(policy=3), "setting.policy"),
        (lambda lines: lines[2]["prefills"][0]["seconds"].pop(), "rounds"),
        (lambda lines: lines[2]["compactions"][0].update(stored="auto"), "compactions[0].stored"),
    ],
)
def test_a_damaged_file_is_refused_by_name_and_place(
    change: Change, told: str, tmp_path: Path
) -> None:
    path = edited(tmp_path / "results.jsonl", change)
    with pytest.raises(BenchFileError) as refused:
        read_report(path)
    assert told in str(refused.value)
    assert str(path) in str(refused.value)


def test_an_unchanged_copy_of_that_file_is_read(tmp_path: Path) -> None:
    assert read_report(edited(tmp_path / "results.jsonl", lambda lines: None)) == a_report()


def test_a_truncated_line_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with pytest.raises(BenchFileError, match="no readable results"):
        read_report(path)
    path.write_text(as_lines(a_report())[:-30], encoding="utf-8")
    with pytest.raises(BenchFileError, match="line 4 is no JSON"):
        read_report(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BenchFileError, match="no readable results"):
        read_report(path)


def test_results_are_added_to_those_of_earlier_sessions(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    first = ResultsFile(path, a_device(), a_model(), load=0.25)
    assert not path.exists()  # nothing to say yet
    first.add(a_prompt(first.session))
    assert read_report(path).sessions[0].load_end is None
    first.end()
    second = ResultsFile(path, a_device(), a_model(name="another name of it"), load=7.0)
    second.add(a_decode(second.session))
    second.end()
    report = read_report(path)
    assert [result.session for result in report.results] == [0, 1]
    assert [s.load_start for s in report.sessions] == [0.25, 7.0]
    assert [s.busy for s in report.sessions] == [False, True] and report.busy
    assert all(s.load_end is not None for s in report.sessions)
    assert report.model.name == "demo"
    assert report == second.report


def test_a_session_without_a_result_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    ResultsFile(path, a_device(), a_model()).end()
    assert not path.exists()
    write_text(path, as_lines(a_report()))
    ResultsFile(path, a_device(), a_model()).end()
    assert read_report(path) == a_report()


@pytest.mark.parametrize(
    ("device", "model", "told"),
    [
        ({"name": "Other CPU"}, {}, "another device (name); expected Other CPU; got Some CPU"),
        ({"kind": "gpu"}, {}, "another device (kind)"),
        ({"mlx": "0.32.5"}, {}, "another device (mlx)"),
        ({"blas": "mlx's own (missing)"}, {}, "another device (blas)"),
        ({}, {"identity": "llama:01"}, "another model (identity)"),
        ({}, {"dtype": "float16"}, "another model (dtype)"),
        ({}, {"synthetic": "layers=4"}, "another model (synthetic)"),
    ],
)
def test_devices_and_models_never_mix(
    device: dict[str, Any], model: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "results.jsonl"
    write_text(path, as_lines(a_report()))
    before = path.read_bytes()
    with pytest.raises(BenchFileError) as refused:
        ResultsFile(path, a_device(**device), a_model(**model))
    assert told in str(refused.value)
    assert path.read_bytes() == before


def test_a_file_is_moved_into_place(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(TypeError):
        write_text(path, None)  # type: ignore[arg-type]
    assert path.read_text(encoding="utf-8") == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.md"]
    write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "new"


def test_a_place_where_nothing_can_be_written_is_known_before(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    for place in (tmp_path, tmp_path / "file" / "below"):
        with pytest.raises(BenchFileError, match="cannot write"):
            require_writable(place)
    with pytest.raises(BenchFileError, match="cannot write"):
        write_text(tmp_path / "file" / "below", "text")
    require_writable(tmp_path / "new" / "results.jsonl")
    assert list((tmp_path / "new").iterdir()) == []


def test_speeds_and_ratios_are_taken_within_a_round() -> None:
    result = a_decode(batch=2)  # 2 x 8 tokens a round
    exact, bound, span, ragged = decode_rows(result)
    assert result.speeds(result.exact) == (8.0, 4.0, 2.0)
    assert (exact.speed.median, exact.against_exact, exact.against_bound) == (4.0, None, None)
    assert bound.against_exact == Spread.of([2.0, 4.0, 8.0]) and bound.against_bound is None
    assert span.against_exact == Spread.of([2.0, 2.0, 5.0])
    assert span.against_bound == Spread.of([1.0, 0.5, 0.625])
    # The ratio of the medians would be 2 here: a round's own ratio is what counts.
    assert ragged.against_exact == Spread.of([1.0, 4.0, 2.0])
    for run in result.runs:
        pairs = zip(result.speeds(run), run.seconds, strict=True)
        assert [speed * seconds for speed, seconds in pairs] == [2 * 8] * 3
    assert [r.run.name for r in (exact, bound, span, ragged)] == [
        "exact",
        "bound: stock cache of 512 rows",
        str(SPAN),
        "snapkv 512, adaptive, ragged",
    ]
    assert str(RAGGED) == "snapkv 512, adaptive, ragged"


def test_what_a_prefill_and_a_compaction_take() -> None:
    stock, span = prefill_rows(a_prompt())
    assert (stock.name, stock.against_stock, stock.after) == ("stock", None, None)
    assert span.against_stock == Spread.of([1.1, 1.0, 1.1])
    assert span.after == Spread.of([0.9 + 0.2, 2.0, 2.7 + 0.6])
    assert span.share_after is not None
    assert span.share_after.median == pytest.approx(0.1)
    assert span.peak_nbytes == 910_000_000
    assert span.peak_against_stock == pytest.approx(910 / 900)
    assert prefill_rows(a_prompt(read=False)) == []
    for row in compaction_rows(a_prompt()):
        assert (row.live_share, row.allocated_share) == (0.25, 24 / 106)
        assert (row.score.median, row.compact.median) == (0.5, 0.002)
