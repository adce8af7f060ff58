"""`kvkeep heads profile` and `kvkeep heads show`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from commands import fault_of, figures
from kvkeep import heads as heads_room
from kvkeep.cli import heads, progress
from kvkeep.cli.main import main
from kvkeep.errors import KvkeepError
from kvkeep.heads import state_file_of
from kvkeep.spec import HeadProfile, load_head_profile
from tiny_folder import write_tiny_folder

QUICK = (
    "--steps", "3", "--length", "900", "--passkeys", "2", "--words", "2", "--recent", "30",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("model")))


def profile(folder: str, output: Path, *more: str) -> int:
    return main(["heads", "profile", "--model", folder, "--output", str(output), *QUICK, *more])


@pytest.mark.parametrize("method", ["optimise", "recall", "estimate"])
def test_from_a_model_folder_to_a_profile(
    method: str, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "heads.json"
    assert profile(folder, path, "--method", method, "--seed", "5") == 0
    made = load_head_profile(path)
    assert (made.method, made.steps, made.seed, made.recent) == (method, 3, 5, 30)
    assert made.model_name == folder
    assert list(made.scores) == [0, 1] and made.kv_heads == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["heads.json"]
    out = capsys.readouterr().out
    assert figures(out)["streaming heads keep"] == "16 sinks + 30 recent rows"
    assert figures(out)["heads"] == "2 layers x 2 KV heads"

    assert main(["heads", "show", str(path)]) == 0
    assert capsys.readouterr().out == out


def test_an_interrupted_command_goes_on(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert profile(folder, tmp_path / "whole.json") == 0
    original = heads_room.profile_heads

    def interrupted(*args: Any, progress: Any, **options: Any) -> HeadProfile:
        def stop(done: int, total: int, words: str) -> None:
            progress(done, total, words)
            if done == 2:
                raise KeyboardInterrupt

        return original(*args, progress=stop, **options)

    with monkeypatch.context() as patch:
        patch.setattr(heads_room, "profile_heads", interrupted)
        assert profile(folder, tmp_path / "parts.json") == 130
    assert state_file_of(tmp_path / "parts.json").exists()
    assert profile(folder, tmp_path / "parts.json") == 0
    parts, whole = (tmp_path / name for name in ("parts.json", "whole.json"))
    assert parts.read_bytes() == whole.read_bytes()


def test_the_state_of_another_command_is_a_fault(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    state_file_of(path).write_bytes(b"something else")
    command = ["heads", "profile", "--model", folder, "--output", str(path), *QUICK]
    assert "cannot be gone on with" in fault_of(capsys, *command)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--recent", "0"), "bad value for recent"),
        (("--recent", "900"), "streaming heads would keep the whole text"),
        (("--steps", "0"), "bad value for steps"),
        (("--lr", "-1"), "bad value for lr"),
        (("--length", "100"), "too few"),
        (("--picture", "heat.jpg"), "ends in .png"),
    ],
)
def test_bad_flags(
    more: tuple[str, ...],
    message: str,
    folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "x.json"
    command = ["heads", "profile", "--model", folder, "--output", str(path), *QUICK, *more]
    assert message in fault_of(capsys, *command)
    assert not path.exists()


def test_an_output_that_is_a_folder_is_a_fault(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["heads", "profile", "--model", folder, "--output", str(tmp_path)]
    assert "--output is a folder" in fault_of(capsys, *command)


def test_showing_another_file_is_a_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"format": "kvkeep head profile", "version": 9}))
    message = fault_of(capsys, "heads", "show", str(tmp_path / "x.json"))
    assert "expected version 1; got version 9" in message
    assert "no readable head profile" in fault_of(capsys, "heads", "show", str(tmp_path / "no"))


def some_profile(layers: int, kv_heads: int) -> HeadProfile:
    scores = {
        i: tuple((i + h) / (layers + kv_heads - 2) for h in range(kv_heads)) for i in range(layers)
    }
    return HeadProfile("llama:1", scores, 4, 64, method="recall", model_name="[small] one")


@pytest.mark.parametrize(("layers", "kv_heads"), [(2, 2), (30, 3), (64, 8)])
def test_the_heat_map_fits_a_terminal_and_shows_the_order(layers: int, kv_heads: int) -> None:
    made = some_profile(layers, kv_heads)
    text = heads.heat_map(made).plain
    assert max(map(len, text.splitlines())) <= 80
    lines = [line for line in text.splitlines() if line.startswith("head ")]
    assert len(lines) == kv_heads
    cells = [line[8:] for line in lines]
    width = len(cells[0]) // layers
    assert width in (1, 2)
    assert cells[0][:width] == " " * width
    assert cells[-1][-width:] == "█" * width
    shades = [heads._SHADES.index(c) for c in cells[0]]
    assert shades == sorted(shades)


def test_names_in_brackets_are_shown_as_they_are() -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(heads.summary_table(some_profile(2, 2)))
    assert "[small] one (llama:1)" in capture.get()
    assert "1.1 1.00, 0.1 0.50, 1.0 0.50, 0.0 0.00" in capture.get()


def test_scores_of_zero_draw_nothing() -> None:
    made = HeadProfile("llama:1", {0: (0.0, 0.0)}, 4, 64, method="recall")
    assert "head 0" in heads.heat_map(made).plain
    assert "█" not in heads.heat_map(made).plain.split("scale")[0]


def test_a_picture_needs_matplotlib_and_says_so_before_the_work(
    folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    command = ["heads", "profile", "--model", folder, "--output", str(tmp_path / "x.json")]
    message = fault_of(capsys, *command, "--picture", str(tmp_path / "x.png"))
    assert "needs matplotlib" in message and "kvkeep[eval]" in message
    assert not (tmp_path / "x.json").exists()


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'eval' is not installed")
    some_profile(30, 3).save(tmp_path / "x.json")
    picture = tmp_path / "new" / "x.png"
    assert main(["heads", "show", str(tmp_path / "x.json"), "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert [entry.name for entry in picture.parent.iterdir()] == ["x.png"]


def steps(console: Console) -> Any:
    return progress.step_progress("profiling heads", "steps", console)


@pytest.mark.parametrize("seconds", [0.0, 6.0])
def test_progress_off_a_terminal_is_a_line_now_and_then(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([index * seconds for index in range(20)])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture, steps(console) as report:
        for done in range(10, 14):
            report(done, 13, "mean gate 0.50")
    lines = capture.get().splitlines()
    if seconds:
        assert lines[0] == "profiling heads: 11/13 steps, mean gate 0.50, 12 s left"
        assert len(lines) == 2
    else:
        assert lines == []


def test_progress_on_a_terminal_is_a_bar_with_the_time_left() -> None:
    console = Console(width=120, force_terminal=True)
    with console.capture() as capture, steps(console) as report:
        report(0, 4, "")
        report(4, 4, "mean gate 0.25")
    shown = capture.get()
    assert "4/4 steps" in shown and "mean gate 0.25" in shown


def test_faults_are_project_errors() -> None:
    with pytest.raises(KvkeepError):
        load_head_profile("nowhere.json")
