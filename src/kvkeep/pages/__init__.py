"""Self-contained HTML pages: one style, nothing from the network, nothing of the data runs."""

from kvkeep.pages.drawing import require_matplotlib
from kvkeep.pages.figures import count, nbytes, percent
from kvkeep.pages.page import asset, escaped, render_page
from kvkeep.pages.tables import TextTable, html_table, markdown_table, markdown_text
from kvkeep.pages.writing import require_writable, written

__all__ = [
    "TextTable",
    "asset",
    "count",
    "escaped",
    "html_table",
    "markdown_table",
    "markdown_text",
    "nbytes",
    "percent",
    "render_page",
    "require_matplotlib",
    "require_writable",
    "written",
]
