"""What a benchmark found, and how it is shown and written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from kvkeep.bench import Device, Spread, ratios, write_text


@dataclass(frozen=True)
class Target:
    """What a ratio (or a figure without a baseline) should reach."""

    sense: Literal["at least", "at most"]
    limit: float

    def met(self, value: float) -> bool:
        """Whether `value` reaches it."""
        return value >= self.limit if self.sense == "at least" else value <= self.limit

    def __str__(self) -> str:
        return f"{'>=' if self.sense == 'at least' else '<='} {self.limit:g}"


@dataclass(frozen=True)
class Result:
    """Figures of one contender, mostly against those of another.

    Attributes:
        case: the setting.
        subject: what is judged.
        values: its figures, one per round.
        unit: of the figures.
        baseline: what it is held against, or None.
        baseline_values: its figures, from the same rounds.
        ratio: "baseline / subject" (how much faster the subject is), or
            "subject / baseline" (how much more it takes).
        target: on the median ratio, on the median figure without a baseline; None where
            the figure is only told.
        note: a few words for the reader.
    """

    case: str
    subject: str
    values: Sequence[float]
    unit: str
    baseline: str | None = None
    baseline_values: Sequence[float] = ()
    ratio: Literal["baseline / subject", "subject / baseline"] = "baseline / subject"
    target: Target | None = None
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        """One ratio per round."""
        if self.baseline is None:
            return []
        if self.ratio == "baseline / subject":
            return ratios(self.baseline_values, self.values)
        return ratios(self.values, self.baseline_values)

    @property
    def judged(self) -> Spread:
        """The spread that the target is about."""
        return Spread.of(self.values if self.baseline is None else self.ratios)

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the target; None without one."""
        return None if self.target is None else self.target.met(self.judged.median)

    def as_json(self) -> dict[str, Any]:
        """Everything, every figure included."""
        spreads = {"subject": asdict(Spread.of(self.values)), "judged": asdict(self.judged)}
        if self.baseline is not None:
            spreads["baseline"] = asdict(Spread.of(self.baseline_values))
        target = None if self.target is None else str(self.target)
        return {**asdict(self), "target": target, "met": self.met, "spreads": spreads}


HEADERS = ("subject", "median (min - max)", "against", "ratio (min - max)", "95 %", "target")


def cells(result: Result) -> tuple[str, ...]:
    """One row of the table, in the order of `HEADERS`."""
    base, ratio, sure = "", "", ""
    if result.baseline is not None:
        judged = result.judged
        base = f"{result.baseline}: {_figures(result.baseline_values, result.unit)}"
        ratio = f"{judged.median:.3f} ({judged.low:.3f} - {judged.high:.3f})"
        sure = f"{judged.median_low:.3f} - {judged.median_high:.3f}"
    target = "" if result.target is None else f"{result.target} {'met' if result.met else 'MISSED'}"
    return result.subject, _figures(result.values, result.unit), base, ratio, sure, target


def by_case(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each setting, in the order they came."""
    cases: dict[str, list[Result]] = {}
    for result in results:
        cases.setdefault(result.case, []).append(result)
    return cases


def notes(results: Sequence[Result]) -> list[str]:
    """What the results have to say in words, each once."""
    return list(dict.fromkeys(result.note for result in results if result.note))


def tables(results: Sequence[Result]) -> list[Table]:
    """One table per setting for the terminal."""
    shown = []
    for case, rows in by_case(results).items():
        shown.append(Table(*HEADERS, title=case, title_justify="left"))
        for result in rows:
            shown[-1].add_row(*cells(result))
    return shown


def markdown(title: str, results: Sequence[Result]) -> str:
    """The same tables in Markdown."""
    lines = [f"## {title}", ""]
    for case, found in by_case(results).items():
        rows = [HEADERS, tuple("---" for _ in HEADERS), *map(cells, found)]
        lines += [f"### {case}", "", *("| " + " | ".join(row) + " |" for row in rows), ""]
    for note in notes(results):
        lines += [note, ""]
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What the figures were taken on; no names of hosts, no paths."""
    return asdict(Device.present())


def write_all(out: Path, report: dict[str, Any], tables: Sequence[str]) -> tuple[Path, Path]:
    """Write OUT.json (every figure) and OUT.md (the tables); returns both paths."""
    data, text = out.with_suffix(".json"), out.with_suffix(".md")
    write_text(data, json.dumps(report, indent=1) + "\n")
    about = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    write_text(text, "\n".join(["# Benchmarks", "", about, "", *tables]))
    return data, text


def _figures(values: Sequence[float], unit: str) -> str:
    spread = Spread.of(values)
    return f"{spread.median:.4g} {unit} ({spread.low:.4g} - {spread.high:.4g})"
