"""`kvkeep eval`: tables, JSON, resuming, files of other runs, and faults in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from commands import fault_of
from evaluations import plan_of, results_file
from kvkeep.cli import eval as command
from kvkeep.cli.main import main
from kvkeep.evaluation import TASKS, TaskRecord, read_results, run_tasks, task_of
from tiny_folder import write_tiny_folder
from tiny_models import tiny_llama

SMALL = ("--tasks", "needle-prose,multi-turn", "--lengths", "900", "--limit", "1")
SETTINGS = ("--policies", "snapkv,knorm", "--budgets", "25%,50%")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny"))


def test_scores_are_shown_and_kept(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["eval", "--model", folder, *SMALL, *SETTINGS, "--seed", "4"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "900 tokens, aware" in out
    rows = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    assert ["task", "setting", "25%", "50%"] in rows
    assert [row[0] for row in rows if "full cache" in row] == [
        "needle-prose",
        "multi-turn",
        "all tasks",
    ]
    shown = next(row for row in rows if row[0] == "snapkv")
    assert all(re.fullmatch(r"\d\.\d\d \(\d\.\d\d–\d\.\d\d\)", cell) for cell in shown[1:])
    (file,) = tmp_path.iterdir()
    assert file.name == "eval-tiny-seed4.jsonl"
    records = read_results(file).records
    assert len(records) == 2 * (1 + 4)
    assert read_results(file).header.seed == 4

    # Given again nothing is computed; --show says the same of the file.
    before = file.read_bytes()
    monkeypatch.setattr("kvkeep.evaluation.running.read", None)
    assert main(argv) == 0
    assert capsys.readouterr().out == out
    assert main(["eval", "--show", str(file)]) == 0
    assert capsys.readouterr().out == out
    assert file.read_bytes() == before


def test_the_summary_as_json(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("A line of text, and then another one. " * 30)
    out = tmp_path / "a.jsonl"
    argv = ["eval", "--model", folder, "--text", str(text), "--lengths", "300", *SETTINGS]
    argv += ["--continuation", "40", "--limit", "2", "--output", str(out)]
    assert main([*argv, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["tasks"] == []
    full, *others = summary["fidelity"]
    assert full["setting"]["policy"] == "none"
    assert (full["kl"]["mean"], full["agreement"]["mean"]) == (0, 1)
    assert len(others) == 4
    for one in others:
        assert one["kl"]["mean"] > 0
        assert len(one["kl_curve"]) == one["continuation"] == 40
        assert one["text"] == "mine.txt"
    assert main(argv) == 0
    assert "mine.txt: 40 tokens after 300" in capsys.readouterr().out
    # Tasks join them in the same file.
    assert main([*argv, "--tasks", "needle-filler", "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert both["fidelity"] == summary["fidelity"]
    assert {one["task"] for one in both["tasks"]} == {"needle-filler"}


def test_prompts_for_other_programs(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "prompts.jsonl"
    mine = tmp_path / "prose.txt"
    mine.write_text("The quick brown fox jumps over the lazy dog every single morning.\n\n" * 9)
    argv = ["eval", "--model", folder, *SMALL, "--export", str(out), "--prose", str(mine)]
    assert main(argv) == 0
    assert capsys.readouterr().out == f"2 prompts in {out}\n"
    header, *lines = map(json.loads, out.read_text().splitlines())
    assert header["schema"] == "kvkeep eval prompts"
    assert [line["task"] for line in lines] == ["needle-prose", "multi-turn"]
    assert all("lazy dog" in line["context"] and line["tokens"] <= 900 for line in lines)
    assert lines[0]["context_text"].startswith("<|user|>")


def test_an_interruption_says_how_to_go_on(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_tasks", interrupted)
    out = tmp_path / "a.jsonl"
    assert main(["eval", "--model", folder, *SMALL, "--output", str(out)]) == 130
    assert f"goes on from {out}" in capsys.readouterr().err
    assert read_results(out).records == ()


def test_foreign_files_are_refused_before_anything_is_computed(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkeep.evaluation.running.read", None)
    argv = ["eval", "--model", folder, *SMALL]
    letter = tmp_path / "letter.txt"
    letter.write_text("Dear reader")
    fault = fault_of(capsys, *argv, "--output", str(letter))
    assert "letter.txt is no results file" in fault
    assert letter.read_text() == "Dear reader"
    other = tmp_path / "other.jsonl"
    assert main(["eval", "--model", folder, *SMALL, "--limit", "1", "--show", str(letter)]) == 2
    capsys.readouterr()
    results_file(other, tiny_llama(seed=5)).close()
    assert "another model" in fault_of(capsys, *argv, "--output", str(other))


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["--model is missing"]),
        (["--tasks", "needles"], ["unknown task 'needles'", "Did you mean"]),
        (["--tasks", ","], ["an empty list"]),
        (["--policies", "snap"], ["unknown eviction policy 'snap'"]),
        (["--budgets", "0%"], ["budget share out of range"]),
        (["--lengths", "4m"], ["bad length"]),
        (["--lengths", "120"], ["too few"]),
        (["--limit", "0"], ["limit"]),
        (["--protocols", "blind"], ["unknown protocol 'blind'", "agnostic"]),
        (["--text", "none.txt"], ["unreadable text file"]),
        (["--prose", "none.txt"], ["unreadable text file"]),
        (["--stores", "shared", "--allocations", "adaptive"], ["unequal numbers of rows"]),
    ],
)
def test_faults_are_told_in_one_line(
    folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    parts: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    model = ["--model", folder] if argv else []
    fault = fault_of(capsys, "eval", *model, *argv)
    for part in parts:
        assert part in fault


def test_the_help_names_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    shown = shown.replace("- ", "-")  # lines break behind hyphens
    assert [name for name in TASKS if name not in shown] == []
    assert "25%,50%" in shown


def test_the_demo_model_finds_a_needle_that_span_keeps(demo_model: Any, tmp_path: Path) -> None:
    model, tokenizer = demo_model
    plan = plan_of(
        ["needle-prose"],
        lengths=(500,),
        policies=("span", "random"),
        budgets=("25%",),
    )
    with results_file(tmp_path / "a.jsonl", model) as file:
        records = run_tasks(model, tokenizer, plan, file)
    scores = {r.policy: r.score for r in records if isinstance(r, TaskRecord)}
    assert scores == {"none": 1.0, "span": 1.0, "random": 0.0}
    assert task_of("needle-prose").max_tokens == 16
