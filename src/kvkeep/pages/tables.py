"""Tables of text, as HTML and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep.pages.page import escaped

#: What Markdown would take for its own: GitHub's dialect, "_" inside words excepted.
_SIGNS = re.compile(r"([\\`*\[\]])")


@dataclass(frozen=True)
class TextTable:
    """A table, its cells as they are shown. The first column holds names, the others figures.

    Attributes:
        title: what it is about.
        headers: of the columns.
        rows: as wide as the headers.
        note: a sentence below it; empty is none.
    """

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def html_table(table: TextTable) -> str:
    """A table that scrolls by itself where the page is narrow, headers with their scope."""
    head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in table.headers)
    body = "\n".join(
        f'<tr><th scope="row">{escaped(row[0])}</th>'
        + "".join(f"<td>{escaped(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.rows
    )
    note = f'<p class="muted small">{escaped(table.note)}</p>' if table.note else ""
    title = escaped(table.title)
    return (
        f'<div class="scrolled" tabindex="0" role="region" aria-label="{title}">'
        f'<table><caption class="unseen">{title}</caption><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>{note}"
    )


def markdown_table(table: TextTable) -> list[str]:
    """The lines of the table alone."""
    rule = ["---", *("---:" for _ in table.headers[1:])]
    return [_joined(table.headers), f"| {' | '.join(rule)} |", *map(_joined, table.rows)]


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return _SIGNS.sub(r"\\\1", plain)


def _joined(cells: Sequence[str]) -> str:
    return "| " + " | ".join(markdown_text(cell).replace("|", "\\|") for cell in cells) + " |"
