"""How a fetch reports where it is, and a bar that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

# stage, done, total: bytes while downloading and unpacking, steps otherwise; done == total ends it.
Report = Callable[[str, int, int], None]

DOWNLOAD, UNPACK, CONVERT, VERIFY = "download", "unpack", "convert", "verify"
_TITLES = {
    DOWNLOAD: "Downloading",
    UNPACK: "Unpacking",
    CONVERT: "Converting",
    VERIFY: "Verifying",
}


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""


@contextmanager
def console_report(console: Console | None = None) -> Iterator[Report]:
    """A `Report` drawn as one bar per stage, on stderr so that a command's output stays clean."""
    console = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        TextColumn("{task.fields[amount]:>16}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                title = _TITLES.get(stage, stage)
                tasks[stage] = bars.add_task(title, total=total, amount="")
            amount = _amount(stage, done, total)
            bars.update(tasks[stage], completed=done, total=total, amount=amount)

        yield report


def _amount(stage: str, done: int, total: int) -> str:
    if stage in (DOWNLOAD, UNPACK):
        return f"{done / 1e6:.1f}/{total / 1e6:.1f} MB"
    return f"{done}/{total}"
