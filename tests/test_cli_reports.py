"""--report, --markdown and --plot of `kvkeep eval` and `kvkeep bench`."""

from __future__ import annotations

import html
from pathlib import Path

import pytest

from bench_reports import a_report
from commands import fault_of
from evaluations import results_file
from kvkeep.bench import as_lines, markdown, write_text
from kvkeep.cli import bench
from kvkeep.cli import eval as evaluate
from kvkeep.cli.main import main
from kvkeep.evaluation import ResultsFile, read_results, summarise
from kvkeep.reports import eval_headline, eval_markdown
from report_results import a_header, some_results
from tiny_folder import write_tiny_folder
from tiny_models import tiny_llama

REPORTS = ("--report", "new/page.html", "--markdown", "new/page.md", "--plot", "new/page.svg")
NAMES = ["page.html", "page.md", "page.svg"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made_up(path: Path) -> Path:
    with ResultsFile(path, a_header()) as file:
        for record in some_results().records:
            file.add(record)
    return path


def test_eval_writes_what_a_file_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made_up(tmp_path / "a.jsonl")
    assert main(["eval", "--show", str(path)]) == 0
    plain = capsys.readouterr().out
    assert main(["eval", "--show", str(path), *REPORTS]) == 0
    assert capsys.readouterr().out == plain
    folder = tmp_path / "new"
    assert sorted(entry.name for entry in folder.iterdir()) == NAMES
    page = html.unescape((folder / "page.html").read_text(encoding="utf-8"))
    assert "kvkeep eval --show a.jsonl --report new/page.html" in page
    assert str(tmp_path) not in page
    assert (folder / "page.md").read_text(encoding="utf-8") == eval_markdown(read_results(path))


def test_eval_writes_what_it_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_tiny_folder(tmp_path / "tiny"))
    argv = ["eval", "--model", folder, "--tasks", "needle-prose,multi-turn", "--lengths", "900"]
    argv += ["--limit", "1", "--policies", "snapkv", "--budgets", "25%"]
    assert main([*argv, *REPORTS]) == 0
    results = read_results(tmp_path / "eval-tiny-seed0.jsonl")
    page = html.unescape((tmp_path / "new" / "page.html").read_text(encoding="utf-8"))
    assert eval_headline(summarise(results.records)) in page
    assert "kvkeep eval: tiny" in page and folder not in page
    assert results.header.model in page
    capsys.readouterr()


def test_bench_writes_what_a_file_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_text(tmp_path / "b.jsonl", as_lines(a_report()))
    assert main(["bench", "--show", "b.jsonl", *REPORTS]) == 0
    capsys.readouterr()
    folder = tmp_path / "new"
    assert sorted(entry.name for entry in folder.iterdir()) == NAMES
    assert "kvkeep bench: demo" in (folder / "page.html").read_text(encoding="utf-8")
    assert (folder / "page.md").read_text(encoding="utf-8") == markdown(a_report())


def test_an_empty_file_makes_a_page_and_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results_file(tmp_path / "a.jsonl", tiny_llama()).close()
    assert main(["eval", "--show", "a.jsonl", "--report", "page.html"]) == 0
    assert "There are no results yet." in (tmp_path / "page.html").read_text(encoding="utf-8")
    capsys.readouterr()
    told = fault_of(capsys, "eval", "--show", "a.jsonl", "--plot", "a.svg")
    assert "nothing to draw" in told and not (tmp_path / "a.svg").exists()


@pytest.mark.parametrize("command", ["eval", "bench"])
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--report", "page.txt"], "ends in .html"),
        (["--report", "folder.html"], "is a folder"),
        (["--markdown", "file/page.md"], "cannot write"),
        (["--plot", "a.pdf"], "ends in .svg or .png"),
    ],
)
def test_bad_names_are_refused_before_anything_is_computed(
    command: str,
    flags: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (evaluate, bench):
        monkeypatch.setattr(module, "load_model", None)
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").write_text("")
    assert told in fault_of(capsys, command, "--model", "demo", *flags)


@pytest.mark.parametrize("command", ["eval", "bench"])
def test_the_help_names_them(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in REPORTS[::2])
