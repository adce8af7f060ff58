"""Results files: JSON lines that are appended one by one, and checked when they are read."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from kvkeep.errors import EvaluationError
from kvkeep.evaluation.plain import as_plain, from_plain
from kvkeep.evaluation.records import KINDS, SCHEMA, SCHEMA_VERSION, TOLD, Header, Record
from kvkeep.evaluation.writing import write_text

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_ANEW = "Give another --output, or move the file away to begin anew."


@dataclasses.dataclass(frozen=True)
class Results:
    """A results file as it was read.

    Attributes:
        header: what the numbers hang on.
        records: in the order of the file.
    """

    header: Header
    records: tuple[Record, ...]


def read_results(path: str | os.PathLike[str]) -> Results:
    """Read a results file. A last line that was cut off is left out.

    Raises:
        EvaluationError: it cannot be read, is no such file, or a line of it is damaged.
    """
    return _read(Path(path))[0]


class ResultsFile:
    """A results file that a run adds to, begun or gone on with.

    Args:
        path: the file; it is made, with its header, if it is not there.
        header: of this run. A file of another one is refused.

    Attributes:
        path: the file.
        header: as it stands in the file.
        records: all so far.

    Raises:
        EvaluationError: the file is foreign, damaged, cannot be written, or another run is
            writing to it.
    """

    def __init__(self, path: str | os.PathLike[str], header: Header) -> None:
        self.path = Path(path)
        if not self.path.exists():
            write_text(self.path, _line(as_plain(header)))
        try:
            self._file = self.path.open("ab")
        except OSError as error:
            raise EvaluationError(f"cannot write {self.path}", received=str(error)) from error
        try:
            _lock(self.path, self._file)
            results, size = _read(self.path)
            _require_same(self.path, results.header, header)
            if self.path.stat().st_size > size:  # a line that an interruption cut off
                os.truncate(self.path, size)
        except BaseException:
            self._file.close()
            raise
        self.header, self.records = results.header, list(results.records)
        self._keys = {record.key for record in self.records}

    def __contains__(self, key: tuple[str, ...]) -> bool:
        return key in self._keys

    def add(self, record: Record) -> None:
        """Append a record: one write, flushed.

        Raises:
            EvaluationError: it cannot be written.
        """
        try:
            self._file.write(_line(as_plain(record)).encode())
            self._file.flush()
        except OSError as error:
            raise EvaluationError(f"cannot write {self.path}", received=str(error)) from error
        self.records.append(record)
        self._keys.add(record.key)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lock(path: Path, file: IO[bytes]) -> None:
    """Hold the file until it is closed: two runs would compute and write everything twice."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise EvaluationError(
            f"another run is writing to {path}", remedy="Wait for it, or give another --output."
        ) from error


def _line(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n"


def _read(path: Path) -> tuple[Results, int]:
    """A file's contents, and how many of its bytes are whole lines."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EvaluationError(f"cannot read {path}", received=str(error)) from error
    size = data.rfind(b"\n") + 1
    first, *rest = data[:size].split(b"\n")[:-1] or [data]
    header = _header(path, first)
    records = tuple(_records(path, rest))
    keys = [record.key for record in records]
    if len(set(keys)) < len(keys):
        raise _damaged(path, "two records of the same example and setting")
    return Results(header, records), size


def _header(path: Path, line: bytes) -> Header:
    expected = f"a results file of `kvkeep eval`, schema version {SCHEMA_VERSION}"
    try:
        values = json.loads(line)
    except ValueError:
        values = None
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        raise EvaluationError(
            f"{path} is no results file", expected=expected, received=_shown(line), remedy=_ANEW
        )
    if values.get("schema_version") != SCHEMA_VERSION:
        raise EvaluationError(
            f"{path} is of another schema",
            expected=expected,
            received=f"version {values.get('schema_version')}",
            remedy=_ANEW,
        )
    try:
        return from_plain(Header, values)
    except ValueError as error:
        raise _damaged(path, f"a header {error}") from error


def _records(path: Path, lines: Iterable[bytes]) -> Iterable[Record]:
    for number, line in enumerate(lines, 2):
        try:
            values = json.loads(line)
            kind = values.get("kind") if isinstance(values, dict) else None
            cls = KINDS.get(str(kind))
            if cls is None:
                raise ValueError(f"of an unknown kind {kind!r}")
            yield from_plain(cls, values)
        except ValueError as error:  # JSON's and UTF-8's are ValueErrors too
            raise _damaged(path, f"line {number} {error}") from error


def _require_same(path: Path, theirs: Header, ours: Header) -> None:
    for field in dataclasses.fields(Header):
        there, here = getattr(theirs, field.name), getattr(ours, field.name)
        if field.name in TOLD or there == here:
            continue
        if field.name == "tasks":
            differing = {name for name in {*there, *here} if there.get(name) != here.get(name)}
            there, here = ({n: tasks.get(n) for n in sorted(differing)} for tasks in (there, here))
        raise EvaluationError(
            f"{path} is of a run with another {field.name}",
            expected=f"{here}",
            received=f"{there}",
            remedy=_ANEW,
        )


def _damaged(path: Path, what: str) -> EvaluationError:
    return EvaluationError(
        f"{path} is damaged",
        expected="whole lines as `kvkeep eval` writes them",
        received=what,
        remedy=_ANEW,
    )


def _shown(line: bytes) -> str:
    text = line[:60].decode("utf-8", "replace")
    return repr(text) if text else "an empty file"
