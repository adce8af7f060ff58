"""Whole files under a temporary name, then moved."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kvkeep.errors import EvaluationError


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file that is either the old one or the whole new one.

    Raises:
        EvaluationError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".kvkeep-") as folder:
            temporary = Path(folder) / "file"
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
    except OSError as error:
        raise EvaluationError(f"cannot write {path}", received=str(error)) from error
