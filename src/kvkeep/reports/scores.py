"""Scores of an evaluation's tasks: charts over the budget, tables, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvkeep.evaluation import ALL_TASKS, NONE, Interval, Summary, TaskSummary
from kvkeep.pages import TextTable, count
from kvkeep.reports.charts import NOTHING, Axis, Chart, Level, Line, Point, spaced
from kvkeep.reports.palette import styles_of

FULL_CACHE = "full cache"
PROTOCOL_WORDS = {
    "aware": "query-aware: the question is compressed with the document",
    "agnostic": "query-agnostic: the question comes after the document was compressed",
}
_SCORE = Axis("mean score", 0, 1, tuple((n / 4, f"{n / 4:g}") for n in range(5)))
_BUDGET = "budget"


@dataclass(frozen=True)
class Block:
    """Scores of one protocol and length.

    Attributes:
        protocol, length: of the prompts.
        summaries: all tasks under all settings.
    """

    protocol: str
    length: int
    summaries: tuple[TaskSummary, ...]

    @property
    def tasks(self) -> list[str]:
        """Names, `ALL_TASKS` last where there are several."""
        return list(dict.fromkeys(s.task for s in self.summaries))

    @property
    def over_all(self) -> str:
        """The task that stands for all."""
        return self.tasks[-1]

    @property
    def budgets(self) -> list[str]:
        """As they were spelled, those of few rows first."""
        return [name for _, name in sorted((x, name) for name, x in self.places.items())]

    @property
    def places(self) -> Mapping[str, float]:
        """The share of rows that stays at a budget, the mean over settings and tasks."""
        shares: dict[str, list[float]] = {}
        for s in self.summaries:
            if s.setting.policy != NONE:
                shares.setdefault(s.setting.budget, []).append(s.rows)
        return {name: sum(found) / len(found) for name, found in shares.items()}

    @property
    def settings(self) -> list[str]:
        """Names of what evicted, without budgets."""
        names = (s.setting.name for s in self.summaries if s.setting.policy != NONE)
        return list(dict.fromkeys(names))

    @property
    def words(self) -> str:
        """Protocol and length."""
        return f"{count(self.length)} tokens, {PROTOCOL_WORDS.get(self.protocol, self.protocol)}"

    def of(self, task: str) -> list[TaskSummary]:
        """One task under all settings."""
        return [s for s in self.summaries if s.task == task]

    def full(self, task: str) -> TaskSummary | None:
        """The full cache's score."""
        return next((s for s in self.of(task) if s.setting.policy == NONE), None)

    def cells(self, task: str) -> dict[tuple[str, str], TaskSummary]:
        """By (setting, budget)."""
        return {
            (s.setting.name, s.setting.budget): s for s in self.of(task) if s.setting.policy != NONE
        }


def blocks(summary: Summary) -> list[Block]:
    """By protocol and length, in the summary's order."""
    keys = dict.fromkeys((s.protocol, s.length) for s in summary.tasks)
    return [
        Block(*key, tuple(s for s in summary.tasks if (s.protocol, s.length) == key))
        for key in keys
    ]


def score_words(value: Interval) -> str:
    """A mean and its interval."""
    return f"{value.mean:.2f} ({value.low:.2f} – {value.high:.2f})"


def setting_styles(summary: Summary) -> dict[str, int]:
    """The look of each setting in all charts of a page."""
    evicting = [s.setting for s in (*summary.tasks, *summary.fidelity)]
    return styles_of(s.name for s in evicting if s.policy != NONE)


def score_chart(block: Block, task: str, styles: Mapping[str, int], title: str = "") -> Chart:
    """Score over budget: a line per setting, the full cache across."""
    full, cells = block.full(task), block.cells(task)
    levels = () if full is None else (_level(full),)
    places = budget_places(block)
    lines = []
    for name in block.settings:
        points = [
            _point(places[budget], budget, cells[name, budget].score)
            for budget in block.budgets
            if (name, budget) in cells
        ]
        if points:
            lines.append(Line(name, styles[name], tuple(points)))
    axis = Axis(_BUDGET, 0, 1, ())
    if places:
        axis = spaced(_BUDGET, [(place, budget) for budget, place in places.items()])
    return Chart(title or task, axis, _SCORE, tuple(lines), levels, _count_words(block, task))


def turn_charts(block: Block, styles: Mapping[str, int]) -> Iterator[Chart]:
    """Score per turn of tasks with several: a chart per task and budget."""
    for task in block.tasks:
        full = block.full(task)
        for budget in block.budgets:
            found = [
                s
                for s in block.of(task)
                if s.turns and task != ALL_TASKS and s.setting.budget == budget
            ]
            if not found:
                continue
            lines = [_turns(s, s.setting.name, styles[s.setting.name]) for s in found]
            if full is not None and full.turns:
                lines.insert(0, _turns(full, FULL_CACHE, -1))
            most = max(len(line.points) for line in lines)
            ticks = tuple((float(n), str(n)) for n in range(1, most + 1))
            axis = Axis("turn", 0.7, most + 0.3, ticks)
            yield Chart(f"{task}, budget {budget}", axis, _SCORE, tuple(lines))


def score_table(block: Block, task: str) -> TextTable:
    """Setting by budget, with intervals."""
    full, cells = block.full(task), block.cells(task)
    rows = []
    if full is not None:
        rows.append((FULL_CACHE, *[score_words(full.score)] * max(len(block.budgets), 1)))
    for name in block.settings:
        shown = (
            score_words(cells[name, b].score) if (name, b) in cells else NOTHING
            for b in block.budgets
        )
        rows.append((name, *shown))
    headers = ("setting", *(block.budgets or ["score"]))
    return TextTable(block.words, headers, tuple(rows), _count_words(block, task))


def task_table(block: Block, budget: str) -> TextTable:
    """Task by setting at one budget: means alone."""
    rows = []
    for task in block.tasks:
        full, cells = block.full(task), block.cells(task)
        found = [full, *(cells.get((name, budget)) for name in block.settings)]
        rows.append((task, *(NOTHING if s is None else f"{s.score.mean:.2f}" for s in found)))
    title = f"{count(block.length)} tokens, {block.protocol}, budget {budget}, by task"
    return TextTable(title, ("task", FULL_CACHE, *block.settings), tuple(rows))


def every_task_table(block: Block) -> TextTable:
    """Task and setting by budget, with intervals and the numbers of examples."""
    rows = []
    for task in block.tasks:
        full, cells = block.full(task), block.cells(task)
        if full is not None:
            shown = [score_words(full.score)] * len(block.budgets)
            rows.append((task, FULL_CACHE, *shown, _examples([full])))
        for name in block.settings:
            found = [cells.get((name, budget)) for budget in block.budgets]
            shown = [NOTHING if s is None else score_words(s.score) for s in found]
            rows.append((task, name, *shown, _examples([s for s in found if s is not None])))
    headers = ("task", "setting", *block.budgets, "examples")
    return TextTable(f"{block.words}, by task", headers, tuple(rows))


def missing_words(block: Block) -> list[str]:
    """What keeps the block's averages from being compared, as after an interruption."""
    told = []
    if block.full(block.over_all) is None:
        told.append(f"{block.words}: the full cache was not asked.")
    task = block.over_all
    most = max(s.score.count for s in block.of(task))
    short = [
        f"{FULL_CACHE if s.setting.policy == NONE else f'{s.setting.name} {s.setting.budget}'}"
        f" {s.score.count}"
        for s in block.of(task)
        if s.score.count < most
    ]
    asked = len(block.settings) * len(block.budgets)
    there = len(block.cells(task))
    if short:
        told.append(
            f"{block.words}: not every setting answered all {most} examples"
            f" ({', '.join(short)}), so these averages are of different questions."
        )
    if there < asked:
        told.append(f"{block.words}: {asked - there} of {asked} settings have no result.")
    return told


def budget_places(block: Block) -> dict[str, float]:
    """Where budgets lie: at their share of rows, or evenly apart where two would meet."""
    places, order = dict(block.places), block.budgets
    near = any(places[b] < 1.15 * places[a] for a, b in pairwise(order))
    return {name: 2.0**n for n, name in enumerate(order)} if near else places


def _point(x: float, budget: str, value: Interval) -> Point:
    return Point(x, value.mean, budget, score_words(value), value.low, value.high)


def _level(full: TaskSummary) -> Level:
    value = full.score
    return Level(FULL_CACHE, value.mean, score_words(value), value.low, value.high)


def _turns(s: TaskSummary, name: str, style: int) -> Line:
    points = (_point(float(n), str(n), turn) for n, turn in enumerate(s.turns, 1))
    return Line(name, style, tuple(points))


def _count_words(block: Block, task: str) -> str:
    counts = sorted({s.score.count for s in block.of(task)})
    if not counts:
        return ""
    few = f"{count(counts[0])} – " if len(counts) > 1 else ""
    plural = "s" if counts[-1] != 1 else ""
    tasks = len(block.tasks) - 1
    of = f" of {tasks} tasks" if task == ALL_TASKS else ""
    return f"Means over {few}{count(counts[-1])} example{plural}{of}, with 95 % intervals (Wilson)."


def _examples(found: Sequence[TaskSummary]) -> str:
    counts = sorted({s.score.count for s in found})
    return " – ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if counts else NOTHING
