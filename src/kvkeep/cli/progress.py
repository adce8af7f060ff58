"""How far the work has come: a bar on a terminal, a line now and then elsewhere."""

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
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from kvkeep.attention import ProgressCallback

#: (steps done, steps in all, a few words on them).
StepProgress = Callable[[int, int, str], None]
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


@contextmanager
def step_progress(title: str, unit: str, console: Console | None = None) -> Iterator[StepProgress]:
    """A callback (done, total, words) that draws long work, with the time left.

    The first call says how far an earlier run had come: those steps do not count as fast.

    Args:
        title: what is being done.
        unit: what is counted.
        console: None draws on stderr.
    """
    console = Console(stderr=True) if console is None else console
    if not console.is_terminal:
        yield _step_lines(console, title, unit)
        return
    columns = (
        TextColumn(title),
        BarColumn(),
        TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit}"),
        TextColumn("{task.fields[words]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # Speed over the last minutes: a step can take many seconds.
    with Progress(*columns, console=console, speed_estimate_period=600) as bar:
        task: TaskID | None = None

        def report(done: int, total: int, words: str) -> None:
            nonlocal task
            if task is None:
                task = bar.add_task("", total=total, completed=done, words=words)
            bar.update(task, completed=done, words=words)

        yield report


def _step_lines(console: Console, title: str, unit: str) -> StepProgress:
    began: float | None = None
    spoke = 0.0
    first = 0

    def report(done: int, total: int, words: str) -> None:
        nonlocal began, spoke, first
        now = time.perf_counter()
        if began is None:
            began, spoke, first = now, now, done
        if done in (first, total) or now - spoke < LINE_EVERY:
            return
        spoke = now
        left = (now - began) / (done - first) * (total - done)
        line = f"{title}: {done:,}/{total:,} {unit}, {words}, {left:.0f} s left"
        console.print(line, highlight=False, soft_wrap=True)

    return report
