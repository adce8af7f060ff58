"""`kvkeep inspect`: from a prompt to a page and a picture, and its faults."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from browser import OpenPage
from commands import fault_of
from kvkeep.cli.main import main
from kvkeep.pages import drawing
from tiny_folder import write_tiny_folder

TEXT = " ".join(f"Line {i} says {i * i} <script>alert({i})</script> ünïcode 漢." for i in range(8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("tiny") / "model", every_byte=True))


def data_of(page: Path) -> Any:
    found = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.S)
    assert found is not None
    return json.loads(found[1])


def test_from_standard_input_to_a_page_and_a_picture(
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    open_page: OpenPage,
) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'eval' is not installed")
    page, picture = tmp_path / "new" / "page.html", tmp_path / "new" / "map.png"
    monkeypatch.setattr(sys, "stdin", io.StringIO(TEXT))
    files = ["--out", str(page), "--png", str(picture)]
    assert main(["inspect", "--model", folder, "-p", "-", *files, "--kv-budget", "40%"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [str(page), str(picture)]
    tokens = mlx_lm.load(folder)[1].apply_chat_template(
        [{"role": "user", "content": TEXT}], add_generation_prompt=True
    )
    rows = int(0.4 * (len(tokens) - 1))
    assert f"{len(tokens)} prompt tokens, read in" in err
    assert f"rows kept: {rows} of {len(tokens) - 1} per KV head" in err
    assert sorted(entry.name for entry in page.parent.iterdir()) == ["map.png", "page.html"]
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    data = data_of(page)
    assert data["tokens"] == list(tokens)
    assert data["rungs"][data["asked"]]["label"] == "40%" and len(data["rungs"]) == 20
    shown = open_page(page)
    assert "<script>alert(3)</script> ünïcode 漢" in shown.locator("#text").inner_text()


def test_flags_choose_layers_budgets_and_the_template(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    argv = ["inspect", "--model", folder, "--prompt", TEXT, "--out", str(page)]
    more = ["--layers", "1", "--budgets", "50%, 20,10kB", "--ignore-chat-template"]
    more += ["--kv-eviction", "snapkv", "--kv-store", "shared", "--prefill-step-size", "50"]
    assert main([*argv, *more]) == 0
    data = data_of(page)
    assert [layer["index"] for layer in data["layers"]] == [1]
    assert [rung["label"] for rung in data["rungs"]] == ["10.00 kB", "20 rows", "25%", "50%"]
    assert "".join(data["texts"]) == TEXT
    assert capsys.readouterr().out == f"{page}\n"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--kv-eviction", "none"), "there is nothing to inspect"),
        (("--kv-budget", "0"), "budget of 0"),
        (("--kv-eviction", "spam"), "Did you mean 'span'?"),
        (("--budgets", "lots"), "unreadable budget"),
        (("--layers", "x"), "unreadable layers"),
        (("--layers", "7"), "layer 7 cannot be shown"),
        (("--prefill-step-size", "0"), "bad value for --prefill-step-size"),
        (("--chat-template-config", "["), "is no JSON"),
        (("--png", "map.jpg"), "ends in .png"),
        (("--out", "page.txt"), "ends in .html"),
    ],
)
def test_bad_flags(
    more: tuple[str, ...],
    message: str,
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in fault_of(capsys, "inspect", "--model", folder, "-p", TEXT, *more)
    assert not any(tmp_path.iterdir())


def test_faults_of_files_and_prompts(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dir.html").mkdir()
    argv = ["inspect", "--model", folder, "-p"]
    assert "is a folder" in fault_of(capsys, *argv, TEXT, "--out", str(tmp_path / "dir.html"))
    page = str(tmp_path / "page.html")
    empty = fault_of(capsys, *argv, "x", "--ignore-chat-template", "--out", page)
    assert "at least 2 tokens" in empty
    absent = fault_of(capsys, "inspect", "--model", "./nowhere", "-p", TEXT, "--out", page)
    assert "there is no such folder" in absent


def test_a_picture_without_matplotlib_is_refused_before_the_work(
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(drawing.importlib, "import_module", missing)
    argv = ["inspect", "--model", folder, "-p", TEXT, "--out", str(tmp_path / "page.html")]
    message = fault_of(capsys, *argv, "--png", str(tmp_path / "map.png"))
    assert "needs matplotlib" in message and "kvkeep[eval]" in message
    assert not any(tmp_path.iterdir())


@pytest.mark.demo_model
def test_the_real_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], open_page: OpenPage
) -> None:
    page = tmp_path / "page.html"
    story = f"{TEXT} The code of the door is 4829163. {TEXT}\n\nWhat is the code of the door?"
    assert main(["inspect", "-p", story, "--out", str(page)]) == 0
    data = data_of(page)
    assert len(data["layers"]) == 30 and data["layers"][0]["sets"] == 3
    assert story in "".join(data["texts"])
    shown = open_page(page)
    assert "The code of the door is 4829163." in shown.locator("#text").inner_text()
    assert "rows kept" in capsys.readouterr().err
