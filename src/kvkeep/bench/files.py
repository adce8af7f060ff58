"""A file of results: JSON lines of one device and one model, valid whenever it is read."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from kvkeep.bench.machine import Device, ModelFacts, load_average
from kvkeep.bench.records import as_json, from_json
from kvkeep.bench.results import (
    FORMAT,
    VERSION,
    BenchReport,
    DecodeResult,
    PromptResult,
    Result,
    Session,
)
from kvkeep.errors import BenchFileError

_KINDS: dict[str, type[Session] | type[PromptResult] | type[DecodeResult]] = {
    "session": Session,
    "prompt": PromptResult,
    "decode": DecodeResult,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class ResultsFile:
    """Results as they come, in memory and (where there is a path) in a file.

    The file is written anew under another name and moved after every result, so whatever
    ends the process leaves all results that were finished.

    Args:
        path: where they go; None keeps them in memory.
        device, model: what they are taken on.
        load: average load of the machine before this run began.

    Raises:
        BenchFileError: the file is no file of results, or of another device or model.
    """

    def __init__(
        self, path: Path | None, device: Device, model: ModelFacts, load: float | None = None
    ) -> None:
        self.path = path
        self.report = BenchReport(device, model)
        if path is not None and path.exists():
            self.report = read_report(path)
            require_same(self.report, device, model, path)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        start = load_average() if load is None else load
        self._begin(Session(now, start, None, device.cores))

    @property
    def session(self) -> int:
        """Index of this run's session."""
        return len(self.report.sessions) - 1

    @property
    def busy(self) -> bool:
        """Whether the machine was busy before this run."""
        return self.report.sessions[-1].busy

    def add(self, result: Result) -> None:
        """Take a result of this session, and write the file."""
        results = (*self.report.results, result)
        self.report = dataclasses.replace(self.report, results=results)
        self._write()

    def end(self) -> None:
        """Note the load at the end; a session without a result leaves no trace."""
        *earlier, last = self.report.sessions
        if not any(result.session == self.session for result in self.report.results):
            sessions = tuple(earlier)
        else:
            sessions = (*earlier, dataclasses.replace(last, load_end=load_average()))
        self.report = dataclasses.replace(self.report, sessions=sessions)
        self._write()

    def _begin(self, session: Session) -> None:
        sessions = (*self.report.sessions, session)
        self.report = dataclasses.replace(self.report, sessions=sessions)

    def _write(self) -> None:
        if self.path is not None and (self.report.results or self.path.exists()):
            write_text(self.path, as_lines(self.report))


def as_lines(report: BenchReport) -> str:
    """A report as JSON lines: the header, its sessions, its results."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "device": as_json(report.device),
        "model": as_json(report.model),
    }
    parts = [{"kind": _NAMES[type(p)], **as_json(p)} for p in (*report.sessions, *report.results)]
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in (header, *parts))


def read_report(path: str | os.PathLike[str]) -> BenchReport:
    """Read a file of results, every value checked.

    Raises:
        BenchFileError: it is missing, truncated, of another layout version, no file of results
            at all, or holds values that no run gives.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchFileError(f"no readable results at {path}", received=str(error)) from error
    try:
        return _parsed(text)
    except BenchFileError as error:
        raise BenchFileError(
            f"{path}: {error.problem}", expected=error.expected, received=error.received
        ) from error


def require_same(report: BenchReport, device: Device, model: ModelFacts, path: Path) -> None:
    """Refuse to add to results of another device or model: figures of two never mix.

    Raises:
        BenchFileError: names the first thing that differs.
    """
    for what, old, new in (("device", report.device, device), ("model", report.model, model)):
        for field in dataclasses.fields(old):
            before, now = getattr(old, field.name), getattr(new, field.name)
            # What a model is called is no part of what it is.
            if before != now and (what, field.name) != ("model", "name"):
                raise BenchFileError(
                    f"{path} holds results of another {what} ({field.name})",
                    expected=str(now),
                    received=str(before),
                    remedy="Give another file: figures of two machines or models do not mix.",
                )


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name and move it into place.

    Raises:
        BenchFileError: it cannot be written. An older file stays as it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".kvkeep-") as folder:
            temporary = Path(folder) / path.name
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
    except OSError as error:
        raise BenchFileError(f"cannot write {path}", received=str(error)) from error


def require_writable(path: Path) -> None:
    """Refuse a place where no file can be written, before there is anything to write.

    Raises:
        BenchFileError: it is a folder, or its folder cannot be made or written in.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".kvkeep-"):
            pass
    except OSError as error:
        raise BenchFileError(f"cannot write {path}", received=str(error)) from error
    if path.is_dir():
        raise BenchFileError(f"cannot write {path}", expected="a file", received="a folder")


def _parsed(text: str) -> BenchReport:
    lines = [_object(line, number) for number, line in enumerate(text.splitlines(), 1)]
    header = lines[0] if lines else {}
    if header.get("format") != FORMAT:
        raise BenchFileError(
            "no file of benchmark results", expected=f'a first line with "format": "{FORMAT}"'
        )
    if header.get("version") != VERSION:
        raise BenchFileError(
            "results of another layout",
            expected=f"version {VERSION}",
            received=f"version {header.get('version')!r}",
        )
    sessions: list[Session] = []
    results: list[Result] = []
    for number, line in enumerate(lines[1:], 2):
        kind = line.pop("kind", None)
        if kind not in _KINDS:
            known = f"a kind of {', '.join(_KINDS)}"
            raise BenchFileError(f"line {number} is no result", expected=known, received=f"{kind}")
        value = from_json(_KINDS[kind], line, f"line {number}")
        if isinstance(value, Session):
            sessions.append(value)
        else:
            results.append(value)
    device = from_json(Device, header.get("device"), "line 1.device")
    model = from_json(ModelFacts, header.get("model"), "line 1.model")
    return BenchReport(device, model, tuple(sessions), tuple(results))


def _object(line: str, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BenchFileError(f"line {number} is no JSON", received=str(error)) from error
    if not isinstance(value, dict):
        raise BenchFileError(f"line {number} is no result", expected="a JSON object")
    return value
