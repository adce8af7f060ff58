"""How far the prompt is read: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from kvkeep.attention import ProgressCallback

#: Seconds between two plain lines.
LINE_EVERY = 5.0
#: Seconds that reading must have taken before plain lines begin.
QUIET_FOR = 1.0


@contextmanager
def prompt_progress(*, shown: bool = True) -> Iterator[ProgressCallback]:
    """A callback (done, total) in tokens that draws on stderr until done == total.

    A prompt of one token draws nothing. Leaving the context takes the bar away.
    """
    console = Console(stderr=True)
    if not shown:
        yield lambda done, total: None
    elif console.is_terminal:
        with _bar(console) as report:
            yield report
    else:
        yield _lines(console)


class _Speed(ProgressColumn):
    """Tokens per second over what is done."""

    def render(self, task: Task) -> Text:
        """The column's text; empty until there is something to divide."""
        speed = task.finished_speed or task.speed
        return Text("" if not speed else f"{speed:,.0f} tok/s", style="progress.data.speed")


@contextmanager
def _bar(console: Console) -> Iterator[ProgressCallback]:
    columns = (
        TextColumn("reading the prompt"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
        _Speed(),
        TimeRemainingColumn(),
    )
    # Speed over the last minutes: attention makes later chunks slower, but chunks can be long.
    progress = Progress(*columns, console=console, transient=True, speed_estimate_period=300)
    task: TaskID | None = None

    def report(done: int, total: int) -> None:
        nonlocal task
        if total <= 1:
            return
        if task is None:
            progress.start()
            task = progress.add_task("", total=total)
        progress.update(task, completed=done, total=total)
        if done >= total:
            progress.stop()  # the answer is next, on the same screen

    try:
        yield report
    finally:
        progress.stop()


def _lines(console: Console, clock: Callable[[], float] = time.perf_counter) -> ProgressCallback:
    began: float | None = None
    spoke = 0.0

    def report(done: int, total: int) -> None:
        nonlocal began, spoke
        now = clock()
        if began is None:
            began, spoke = now, now - LINE_EVERY + QUIET_FOR
        if not 0 < done < total or now - spoke < LINE_EVERY:
            return
        spoke = now
        speed = done / (now - began)
        left = (total - done) / speed
        read = f"reading the prompt: {done:,}/{total:,} tokens"
        line = f"{read}, {speed:,.0f} tok/s, {left:.0f} s left"
        console.print(line, highlight=False, soft_wrap=True)

    return report
