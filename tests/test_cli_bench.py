"""`kvkeep bench`: from a model to a file and a table, and every fault in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench_reports import a_report
from commands import cells, fault_of
from kvkeep.bench import as_lines, markdown, read_report, running, write_text
from kvkeep.cli import bench
from kvkeep.cli.main import main
from kvkeep.errors import BenchFileError
from tiny_folder import write_tiny_folder

QUICK = (
    "--lengths", "160", "--budgets", "40%",
    "--tokens", "2", "--rounds", "2", "--prompt-rounds", "1",
)  # fmt: skip
TINY = ("--synthetic", "layers=2,heads=4,kv_heads=2,dim=16,hidden=32,vocab=64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("models") / "tiny"))


def test_from_a_model_to_a_file_and_a_table(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, text = tmp_path / "new" / "results.jsonl", tmp_path / "new" / "results.md"
    command = ["bench", "--model", folder, *QUICK, "--batch", "1,2", "--stores", "per-head,union"]
    assert main([*command, "--out", str(path), "--markdown", str(text)]) == 0
    out, err = capsys.readouterr()
    report = read_report(path)
    assert report.model.name == "tiny"  # not the folders above it
    assert [decode.batch for decode in report.decodes] == [1, 2]
    assert [r.setting.store for r in report.decodes[0].runs if r.setting] == ["per-head", "union"]
    assert report.prompts[0].stock_seconds
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["results.jsonl", "results.md"]
    assert text.read_text(encoding="utf-8") == markdown(report)
    table = cells(out)
    assert {"exact", "stock", "lookahead 40%, union"} <= table.keys()
    assert table["lookahead 40%, per-head"][0] == "64"
    assert "CPU" in out and "Traceback" not in err

    assert main([*command, "--out", str(path)]) == 0  # nothing is left to measure
    again = capsys.readouterr().out
    assert read_report(path) == report
    assert main(["bench", "--show", str(path)]) == 0
    assert capsys.readouterr().out == again == out


@pytest.mark.parametrize("flags", [["--format", "json"], ["--json"]])
def test_json_on_stdout_is_a_file_of_results(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *TINY, *QUICK, *flags]) == 0
    path = tmp_path / "results.jsonl"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    report = read_report(path)
    assert report.model.synthetic.startswith("layers=2,heads=4")
    assert report.model.synthetic.endswith("mlp=96,vocab=64")
    assert len(report.decodes) == 1 and report.prompts[0].stock_seconds == ()


def test_markdown_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.jsonl"
    write_text(path, as_lines(a_report()))
    assert main(["bench", "--show", str(path), "--format", "md"]) == 0
    assert capsys.readouterr().out == markdown(a_report())


def test_combinations_without_a_meaning_are_left_out_and_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["--stores", "shared,ragged", "--allocations", "uniform,adaptive"]
    assert main(["bench", *TINY, *QUICK, *asked, "--json"]) == 0
    out, err = capsys.readouterr()
    assert "left out: allocation 'adaptive' gives heads of a layer unequal numbers" in err
    (decode,) = [line for line in map(json.loads, out.splitlines()) if line.get("kind") == "decode"]
    stores = [run["setting"] for run in decode["runs"] if run["setting"]]
    assert [(s["allocation"], s["store"]) for s in stores] == [
        ("uniform", "shared"), ("uniform", "ragged"), ("adaptive", "ragged"),
    ]  # fmt: skip


def test_a_busy_machine_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for load, warned in ((1000.0, True), (0.0, False)):
        monkeypatch.setattr(bench, "load_average", lambda load=load: load)
        assert main(["bench", *TINY, *QUICK, "--format", "md"]) == 0
        out, err = capsys.readouterr()
        assert ("warning: the machine is busy (load 1000.0" in err) is warned
        assert ("The machine was busy before the run (load 1000.0" in out) is warned


def test_an_interrupted_command_leaves_a_valid_file_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    command = ["bench", *TINY, *QUICK, "--batch", "1,2", "--out", str(path)]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(running, "decode", interrupt)
        assert main(command) == 130
    assert "the same command goes on" in capsys.readouterr().err
    half = read_report(path)
    assert (len(half.prompts), len(half.decodes)) == (1, 0)
    assert half.sessions[0].load_end is not None
    assert main(command) == 0
    whole = read_report(path)
    assert whole.prompts == half.prompts
    assert [(d.batch, d.session) for d in whole.decodes] == [(1, 1), (2, 1)]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--lengths", "4kb"], "unreadable --lengths"),
        (["--lengths", ","], "no lengths to measure"),
        (["--batch", "two"], "unreadable --batch"),
        (["--budgets", "many"], "unreadable budget"),
        (["--budgets", ""], "no settings to measure"),
        (["--budgets", "200"], "nothing is evicted of 160 tokens"),
        (["--policies", "spam"], "spam"),
        (["--allocations", "spam"], "spam"),
        (["--stores", "spam"], "store"),
        (["--stores", "shared", "--allocations", "adaptive"], "ragged"),
        (["--policies", "kvzip"], "must see the whole prefill"),
        (["--tokens", "0"], "tokens"),
        (["--rounds", "0"], "rounds"),
        (["--prompt-rounds", "-1"], "prompt_rounds"),
        (["--seed", "-1"], "seed"),
        (["--synthetic", "layers=2,depth=3"], "unreadable synthetic model"),
        (["--synthetic", "heads=3,kv_heads=2"], "do not divide"),
        (["--model", "demo"], "exclude each other"),
        (["--show", "results.jsonl"], "exclude each other"),
    ],
)
def test_a_fault_is_one_line(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in fault_of(capsys, "bench", *TINY, *QUICK, *flags)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--dtype", "float16"], "--dtype is for synthetic models"),
        (["--show", "no/such.jsonl"], "no readable results at no/such.jsonl"),
        (["--show", "x", "--out", "y"], "exclude each other"),
        (["--model", "./no-such-model"], "there is no such folder"),
    ],
)
def test_a_fault_without_a_model_is_one_line(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in fault_of(capsys, "bench", *QUICK, *flags)


def test_a_file_of_another_device_or_place_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "run_bench", None)
    path = tmp_path / "results.jsonl"
    write_text(path, as_lines(a_report()))
    before = path.read_bytes()
    for flag in ("--out", "--markdown"):
        told = fault_of(capsys, "bench", *TINY, *QUICK, flag, str(tmp_path))
        assert told.startswith(f"cannot write {tmp_path}")
    assert main(["bench", *TINY, *QUICK, "--out", str(path)]) == 2
    fault = capsys.readouterr().err.splitlines()[-1]
    assert "holds results of another device (name)" in fault
    assert path.read_bytes() == before
    path.write_text("{}\n", encoding="utf-8")
    assert main(["bench", *TINY, *QUICK, "--out", str(path)]) == 2
    assert path.read_text(encoding="utf-8") == "{}\n"
    with pytest.raises(BenchFileError):
        read_report(path)


def test_help_names_every_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    text = capsys.readouterr().out
    for flag in ("lengths", "budgets", "policies", "allocations", "stores", "batch", "synthetic"):
        assert f"--{flag}" in text


def test_the_real_model(
    demo_model: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    asked = ["--lengths", "200", "--batch", "2", "--stores", "shared", "--prompt-rounds", "1"]
    assert main(["bench", *asked, "--rounds", "1", "--tokens", "1", "--out", str(path)]) == 0
    report = read_report(path)
    assert report.model.name == "demo"
    row = 3 * 64 * 2 * 30 * (4 if report.model.dtype == "float32" else 2)
    exact, bound, span = report.decodes[0].runs
    assert exact.live_nbytes == 2 * 200 * row
    assert bound.live_nbytes == span.live_nbytes == 2 * 50 * row
    assert "lookahead 25%, shared" in capsys.readouterr().out
