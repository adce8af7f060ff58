"""Commands run in this process, and what they print taken apart."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvkeep.cli.main import main


def fault_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a command fails with."""
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("kvkeep: error: ")
    return line.removeprefix("kvkeep: error: ")


def chat_tokens(tokenizer: Any, text: str) -> list[int]:
    message = {"role": "user", "content": text}
    return tokenizer.apply_chat_template([message], add_generation_prompt=True)


def figures(out: str) -> dict[str, str]:
    """Name → value of the lines of the table below an answer."""
    rows = (re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in out.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def cells(out: str) -> dict[str, list[str]]:
    """Name → cells of the lines of a table with borders."""
    rows = [line.strip("│┃ ").split("│") for line in out.splitlines() if line.startswith("│")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
