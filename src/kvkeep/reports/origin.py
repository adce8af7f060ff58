"""Where figures come from: model, device, versions, seed, date, command."""

from __future__ import annotations

import datetime
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvkeep.bench import BenchReport, device_line, model_line
from kvkeep.evaluation import Results, TaskRecord
from kvkeep.pages import count


@dataclass(frozen=True)
class Origin:
    """What a page says of its own making.

    Attributes:
        made: when, UTC.
        command: that made it; empty where it was no command.
    """

    made: str
    command: str = ""

    @classmethod
    def now(cls, argv: Sequence[str] = ()) -> Origin:
        """This moment, and a command's arguments without the folders in front of file names."""
        made = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        return cls(made, shlex.join(["kvkeep", *map(_without_folders, argv)]) if argv else "")

    @property
    def facts(self) -> list[tuple[str, str]]:
        """(name, value) of a page's block."""
        command = [("Command of this page", self.command)] if self.command else []
        return [("Page made", self.made), *command]


def eval_facts(results: Results) -> list[tuple[str, str]]:
    """(name, value): what an evaluation's numbers hang on."""
    h = results.header
    tasks = [record for record in results.records if isinstance(record, TaskRecord)]
    versions = {
        "kvkeep": h.kvkeep, "mlx": h.mlx, "mlx-lm": h.mlx_lm,
        "transformers": h.transformers, "Python": h.python,
    }  # fmt: skip
    facts = [
        ("Model", _name(h.model_name) or h.model),
        ("Model's identity", h.model),
        ("Weights", h.dtype),
        ("Device", h.device),
        ("System", h.platform),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("Seed", str(h.seed)),
        ("Prose", h.prose),
        ("Results", count(len(results.records))),
    ]
    if tasks:
        used = dict.fromkeys(record.task for record in tasks)
        facts.append(("Tasks", ", ".join(f"{t} v{h.tasks.get(t, '?')}" for t in used)))
    return facts


def eval_line(results: Results) -> str:
    """The most important of them in a line."""
    h = results.header
    return (
        f"{_name(h.model_name) or h.model}, {h.dtype}, {h.device}; kvkeep {h.kvkeep},"
        f" mlx {h.mlx}, mlx-lm {h.mlx_lm}; seed {h.seed}"
    )


def bench_facts(report: BenchReport) -> list[tuple[str, str]]:
    """(name, value): what a benchmark's figures were taken on."""
    sessions = ", ".join(
        f"{s.started} (load {s.load_start:.1f}"
        + (")" if s.load_end is None else f" to {s.load_end:.1f})")
        for s in report.sessions
    )
    seeds = ", ".join(str(seed) for seed in sorted({r.seed for r in report.results}))
    return [
        ("Model", model_line(report.model)),
        ("Model's identity", report.model.identity),
        ("Device and versions", device_line(report.device)),
        ("Measured", sessions or "nothing yet"),
        ("Seed", seeds or "–"),
        ("Results", count(len(report.results))),
    ]


def _name(model: str) -> str:
    """A model's name without the folders of this machine; hub repositories stay as they are."""
    return _without_folders(model)


def _without_folders(argument: str) -> str:
    flag, equals, value = (
        argument.partition("=") if argument.startswith("--") else ("", "", argument)
    )
    # A path on this machine tells its owner's name; "owner/name" of a hub is no path.
    if value.startswith((".", "~", os.sep)) or value.count(os.sep) > 1:
        value = Path(value).name or value
    return f"{flag}{equals}{value}"
