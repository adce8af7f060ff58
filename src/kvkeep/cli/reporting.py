"""The flags that put results into a page, a Markdown file or a picture."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from kvkeep.pages import require_writable, written
from kvkeep.reports import Origin, Picture, require_drawable, save_picture


def add_report_flags(group: Any, plotted: str) -> None:
    """Add --report, --markdown and --plot.

    Args:
        group: a parser, or a group of one.
        plotted: what the picture shows.
    """
    group.add_argument(
        "--report",
        metavar="FILE.html",
        help="write a self-contained page with the figures, plots and tables",
    )
    group.add_argument("--markdown", metavar="FILE.md", help="write the tables as Markdown")
    group.add_argument(
        "--plot",
        metavar="FILE.svg",
        help=f"write a picture: {plotted}; .svg, or .png with the extra 'eval'",
    )


def require_reports(args: argparse.Namespace) -> None:
    """Refuse names that cannot be written, before anything is computed.

    Raises:
        OutputError, ConfigError: as `pages.require_writable` and `reports.require_drawable`.
    """
    if args.report is not None:
        require_writable(args.report, ".html")
    if args.markdown is not None:
        require_writable(args.markdown)
    if args.plot is not None:
        require_drawable(args.plot)


def write_reports(
    args: argparse.Namespace,
    page: Callable[[Origin], str],
    markdown: Callable[[], str],
    picture: Callable[[], Picture],
) -> None:
    """Write what was asked for.

    Raises:
        OutputError: a file cannot be written, or there is nothing to draw.
    """
    if args.report is not None:
        _write(args.report, page(Origin.now(args.argv)))
    if args.markdown is not None:
        _write(args.markdown, markdown())
    if args.plot is not None:
        save_picture(picture(), args.plot)


def _write(file_name: str, text: str) -> None:
    with written(file_name) as path:
        path.write_text(text, encoding="utf-8", newline="\n")
