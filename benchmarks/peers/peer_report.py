"""The Markdown report: what was compared, how it came out, and each row where kvkeep is behind."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from peer_answers import Prompt, Timing
from peer_judging import (
    Difference,
    Row,
    Scores,
    best_of,
    difference,
    mean_bytes,
    rate,
    rows,
    same_rows,
)
from peer_plan import BUDGETS, FULL, OWN, PAIRS, RECOMMENDED, VELOX

BEST_AT = "25%"
_MB = 1e6


@dataclass(frozen=True)
class Report:
    """All that the report is made of.

    Attributes:
        date: of the run.
        command: that makes it.
        prompts: asked.
        header: of their export.
        scores: by side: "kvkeep", "kvpress", "velox".
        versions: first line of each side's answers.
        times: by side, what they were taken with and the times.
        kept: by side, which rows each setting kept of a few prompts.
        failed: the end of the log of each side that could not run.
        notes: Markdown written by a person.
    """

    date: str
    command: str
    prompts: Sequence[Prompt]
    header: Mapping[str, Any]
    scores: Mapping[str, Scores]
    versions: Mapping[str, Mapping[str, Any]]
    times: Mapping[str, tuple[Mapping[str, Any], Sequence[Timing]]] = field(default_factory=dict)
    kept: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    notes: str = ""

    @property
    def tasks(self) -> list[str]:
        """In the order of the prompts."""
        return list(dict.fromkeys(prompt.task for prompt in self.prompts))


def markdown(report: Report) -> str:
    """The whole report."""
    theirs = report.scores.get("kvpress", {})
    found = rows(report.scores["kvkeep"], theirs, report.tasks)
    parts = [
        f"# kvkeep beside its peers, {report.date}",
        _setting(report),
        _full(report),
    ]
    if found:
        parts += [
            _together(found, report),
            _best(report.scores["kvkeep"], theirs),
            _shipped(report.scores["kvkeep"], theirs),
        ]
    parts += [_velox(report), _resources(report)]
    parts += ["## What the figures say", report.notes.strip()] if report.notes.strip() else []
    if found:
        parts += [_behind(found), _by_task(found, report.tasks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _setting(report: Report) -> str:
    counts = {task: sum(p.task == task for p in report.prompts) for task in report.tasks}
    each = sorted(set(counts.values()))
    lengths = [len(prompt.ids) for prompt in report.prompts]
    versions = "; ".join(
        f"{side}: " + ", ".join(f"{k} {v}" for k, v in about.items() if k in _TOLD)
        for side, about in report.versions.items()
    )
    return "\n".join(
        [
            f"Written by `{report.command}`. {_machine()}. {versions}.",
            "",
            f"{len(report.prompts)} prompts: {len(report.tasks)} tasks of `kvkeep eval`,"
            f" {' to '.join(map(str, each))} each, seed {report.header.get('seed')},"
            f" {min(lengths)} to {max(lengths)} tokens; the demo model in float32. All sides read"
            " the same weights file and the same token ids (each tokenises the text itself and"
            " refuses other ids), answer greedily, and are scored by kvkeep's scorer.",
            "",
            "Protocol, the same for all: the whole prompt but its last token is prefilled and"
            " compressed, question included; the last token and the answer follow on the compressed"
            " cache. kvpress: compression ratio = 1 - budget, `press.forward_hook` on what one"
            " prefill handed each layer (checked bit for bit against `with press(model):`), KVzip"
            " in its own context manager, answers by kvpress's `generate_answer`. Its AdaKV and"
            " KVzip presses mask rows head by head and free none. Differences are kvkeep's score"
            " minus the peer's on the same prompts, in brackets a 95 % bootstrap interval over"
            " prompts; with few prompts of equal difference it is narrower than it should be.",
        ]
    )


_TOLD = ("kvkeep", "kvpress", "torch", "transformers", "mlx", "mlx_lm", "mlx-lm", "veloxquant-mlx")


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, CPU only"


def _full(report: Report) -> str:
    lines = ["## The full cache", "", _cells("side", "all", *report.tasks)]
    lines.append(_cells(*["---"] * (len(report.tasks) + 2)))
    for side, scores in report.scores.items():
        found = [rate(scores, FULL, "100%", task) for task in ("", *report.tasks)]
        lines.append(_cells(side, *map(_score, found)))
    peers = [side for side in report.scores if side != "kvkeep"]
    ours = report.scores["kvkeep"]
    for side in peers:
        same = difference(ours, report.scores[side], FULL, FULL, "100%")
        if same is not None:
            lines += ["", f"Same text as {side}'s on {same.same_text} of {same.count} prompts."]
    return "\n".join(lines)


def _together(found: Sequence[Row], report: Report) -> str:
    lines = [
        "## Policies that both have, by the same rule",
        "",
        "All tasks together; kvkeep's options are set to kvpress's (window 64, kernel 5, no sinks"
        " or recent rows beyond the press's own). Same rows: the share of kept rows that both keep,"
        " over layers and heads of the first prompts.",
        "",
        _cells(
            *("policy", "budget", "kvkeep", "kvpress", "difference", "won : lost"),
            *("same text", "same rows", ""),
        ),
        _cells(*["---"] * 9),
    ]
    kept, other = (report.kept.get(side, {}) for side in ("kvkeep", "kvpress"))
    for row in (row for row in found if not row.task):
        d = row.difference
        same = same_rows(kept, other, row.name, row.budget)
        lines.append(
            _cells(
                row.name,
                row.budget,
                _score(d.ours),
                _score(d.theirs),
                _interval(d),
                f"{d.won} : {d.lost}",
                f"{d.same_text}/{d.count}",
                "" if same is None else f"{100 * same:.2f} %",
                d.verdict,
            )
        )
    worse = [row for row in found if not row.task and row.difference.verdict == "worse"]
    count = sum(not row.task for row in found)
    lines += ["", f"{count - len(worse)} of {count} within noise of kvpress or better."]
    return "\n".join(lines)


def _best(ours: Scores, theirs: Scores) -> str:
    ranking = best_of(theirs, BEST_AT)
    if not ranking:
        return ""
    lines = [
        f"## The recommended setting against kvpress's best, at {BEST_AT}",
        "",
        "kvpress's settings by their mean on these prompts; the best is picked with the answers"
        " known, which favours kvpress.",
        "",
        _cells("kvpress", "score", f"{RECOMMENDED.name} - kvpress", "won : lost", ""),
        _cells(*["---"] * 5),
    ]
    for name, mean in ranking:
        d = difference(ours, theirs, RECOMMENDED.name, name, BEST_AT)
        if d is not None:
            lines.append(_cells(name, _score(mean), _interval(d), f"{d.won} : {d.lost}", d.verdict))
    lines += ["", f"kvkeep {RECOMMENDED.name}: {_score(rate(ours, RECOMMENDED.name, BEST_AT))}."]
    return "\n".join(lines)


def _shipped(ours: Scores, theirs: Scores) -> str:
    lines = [
        "## As kvkeep ships them",
        "",
        _cells("kvkeep", "budget", "score", "full cache", "against kvpress's", "difference", ""),
        _cells(*["---"] * 7),
    ]
    full = _score(rate(ours, FULL, "100%"))
    for own in OWN:
        for budget in BUDGETS:
            against = own.against or next(iter(best_of(theirs, budget)), ("",))[0]
            d = difference(ours, theirs, own.name, against, budget)
            if d is not None:
                against = against if own.against else f"best here, {against}"
                lines.append(
                    _cells(own.name, budget, _score(d.ours), full, against, _interval(d), d.verdict)
                )
    return "\n".join(lines)


def _velox(report: Report) -> str:
    head = "## veloxquant-mlx"
    if "velox" in report.failed:
        return f"{head}\n\nIt did not run here:\n\n```\n{report.failed['velox']}\n```"
    theirs, ours = report.scores.get("velox", {}), report.scores["kvkeep"]
    if not theirs:
        return ""
    lines = [
        head,
        "",
        "Its budget is in rows per head, as many as the share gives.",
        "",
        _cells("method", "budget", "score", "rows", "MB held", "kvkeep", "difference", ""),
        _cells(*["---"] * 8),
    ]
    for method in VELOX:
        for name in (method.against, RECOMMENDED.name):
            for budget in BUDGETS:
                d = difference(ours, theirs, name, method.name, budget)
                held = mean_bytes(theirs, method.name, budget)
                if d is not None and held is not None:
                    lines.append(
                        _cells(
                            *(method.name, budget, _score(d.theirs)),
                            *(f"{held[0]:.0f}", f"{held[1] / _MB:.1f}"),
                            *(f"{name} {_score(d.ours)}", _interval(d), d.verdict),
                        )
                    )
    return "\n".join(lines)


def _resources(report: Report) -> str:
    lines = [
        "## Bytes and times",
        "",
        "Different frameworks (torch, and MLX with a fast BLAS) on the same cores, one prompt, each"
        " side alone: medians, and the range over rounds. Prefill holds scoring and compression."
        " Bytes are of K and V after compression, masked rows included (mean over the prompts);"
        " rows are those that attention sees.",
        "",
        _cells("side", "setting", "budget", "rows", "MB held", "prefill s", "decode ms/token"),
        _cells(*["---"] * 7),
    ]
    for side, scores in report.scores.items():
        about, times = report.times.get(side, ({}, ()))
        taken = {(timing.setting, timing.budget): timing for timing in times}
        names = dict.fromkeys(key[2:] for key in scores)
        for name, budget in sorted(names, key=lambda n: (n[0] != FULL, n[0], float(n[1][:-1]))):
            held = mean_bytes(scores, name, budget)
            timing = taken.get((name, budget))
            if held is None or (timing is None and budget not in ("100%", BEST_AT)):
                continue
            lines.append(
                _cells(
                    *(side, name, budget, f"{held[0]:.0f}", f"{held[1] / _MB:.1f}"),
                    "" if timing is None else _spread(timing.prefill, 1, 2),
                    "" if timing is None else _spread(timing.token, 1000, 1),
                )
            )
        if about:
            lines[2] += f" {side}: {', '.join(f'{k} {about[k]}' for k in _RUN if k in about)}."
    return "\n".join(lines)


_RUN = ("threads", "blas")


def _behind(found: Sequence[Row]) -> str:
    lines = [
        "## Every row where kvkeep is behind",
        "",
        "A row is a task at a budget. With the same rule on both sides what is left is chance: near"
        " ties that two frameworks round differently, and answers that tip on it. Then rows won and"
        " lost should balance. Of each lost prompt: kvpress's answer, then kvkeep's.",
    ]
    for pair in PAIRS:
        mine = [row for row in found if row.name == pair.name and row.task]
        lost = [row for row in mine if row.difference.mean < 0]
        won = sum(row.difference.mean > 0 for row in mine)
        lines += [
            "",
            f"**{pair.name}**: {len(lost)} of {len(mine)} rows behind, {won} ahead. Not the same on"
            f" both sides: {pair.differs}.",
        ]
        if lost:
            lines.append("")
        for row in lost:
            d = row.difference
            said = "; ".join(
                f"prompt {index}: {_quoted(theirs)} · {_quoted(ours)}"
                for index, theirs, ours in d.losses
            )
            lines.append(
                f"- {row.task}, {row.budget}: {_score(d.ours)} against {_score(d.theirs)}"
                f" ({d.verdict}; {d.same_text} of {d.count} answers the same text). {said}"
            )
    return "\n".join(lines)


def _by_task(found: Sequence[Row], tasks: Sequence[str]) -> str:
    lines = ["## Task by task", "", "kvkeep · kvpress, difference."]
    for budget in BUDGETS:
        lines += ["", f"### {budget}", "", _cells("policy", *tasks)]
        lines.append(_cells(*["---"] * (len(tasks) + 1)))
        for pair in PAIRS:
            mine = {r.task: r for r in found if (r.name, r.budget) == (pair.name, budget)}
            lines.append(_cells(pair.name, *(_of_task(mine.get(task)) for task in tasks)))
    return "\n".join(lines)


def _of_task(row: Row | None) -> str:
    if row is None:
        return ""
    d = row.difference
    both = f"{_score(d.ours)} · {_score(d.theirs)}"
    return both if d.mean == 0 and d.low == d.high else f"{both}, {_interval(d)}"


def _interval(d: Difference) -> str:
    return f"{_signed(d.mean)} ({_signed(d.low)} to {_signed(d.high)})"


def _signed(value: float) -> str:
    return f"{value:+.2f}" if abs(value) >= 0.005 else "0.00"


def _score(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _spread(values: Iterable[float], factor: float, digits: int) -> str:
    ordered = [factor * value for value in values]
    middle, low, high = statistics.median(ordered), min(ordered), max(ordered)
    return f"{middle:.{digits}f} ({low:.{digits}f} – {high:.{digits}f})"


def _quoted(text: str) -> str:
    """An answer in one short piece of code."""
    flat = " ".join(text.split()).replace("`", "'").replace("|", "/")
    return f"`{flat[:48]}…`" if len(flat) > 48 else f"`{flat or ' '}`"


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
