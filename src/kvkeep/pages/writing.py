"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvkeep.errors import OutputError


@contextmanager
def written(file_name: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path of the same name, moved to `file_name` when the block ends well.

    Folders on the way are made.

    Raises:
        OutputError: it cannot be written.
    """
    path = Path(file_name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".kvkeep-") as folder:
            temporary = Path(folder) / path.name
            yield temporary
            os.replace(temporary, path)
    except OSError as error:
        raise OutputError(f"cannot write {path}", received=str(error)) from error


def require_writable(file_name: str | os.PathLike[str], *suffixes: str) -> None:
    """Refuse a name that `written` would fail on after the work was done.

    Args:
        suffixes: what the name must end in, such as ".png" or ".svg"; none is anything.

    Raises:
        OutputError: another ending, or a folder of that name.
    """
    path = Path(file_name)
    if suffixes and path.suffix.lower() not in suffixes:
        raise OutputError(
            "bad name for a file",
            expected=f"a name that ends in {' or '.join(suffixes)}",
            received=str(path),
        )
    if path.is_dir():
        raise OutputError(f"cannot write {path}: it is a folder", expected="the name of a file")
    parent = path.parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise OutputError(
            f"cannot write {path}", expected="a folder to write to", received=str(parent)
        )
