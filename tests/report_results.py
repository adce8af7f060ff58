"""Made-up results of evaluations, with figures that are easy to check by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

from kvkeep.evaluation import (
    FidelityRecord,
    HarnessRecord,
    Header,
    Record,
    Results,
    TaskRecord,
)
from kvkeep.evaluation.records import SCHEMA, SCHEMA_VERSION

#: Texts that would run, or break out of where they stand, if they could.
NASTY = "<script>window.pwned=1</script>\"'><img src=x onerror=window.pwned=2>|`*"
TASKS = ("needle-prose", "multi-key", "multi-turn")
BUDGETS = {"5%": 0.05, "10%": 0.1, "25%": 0.25, "50%": 0.5}
#: Scores of one policy over the budgets.
SCORES = {
    "span": (0.25, 0.5, 0.75, 1.0),
    "snapkv": (0.0, 0.5, 0.5, 1.0),
    "sink_recent": (0.0, 0.0, 0.25, 0.5),
}


def a_header(**changes: Any) -> Header:
    known: dict[str, Any] = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "model": "llama:00",
        "model_name": "demo",
        "kvkeep": "0.1.0",
        "mlx": "0.32.4",
        "mlx_lm": "0.32.2",
        "transformers": "5.0.0",
        "python": "3.12.1",
        "platform": "Linux",
        "device": "cpu, Some CPU",
        "dtype": "float32",
        "seed": 3,
        "prose": "abc",
        "prefill_step": 2048,
        "tasks": dict.fromkeys(TASKS, 1),
    }
    return Header(**{**known, **changes})


def a_task(
    task: str, index: int, policy: str, budget: str, turns: Sequence[float], **changes: Any
) -> TaskRecord:
    share = BUDGETS.get(budget, 1.0)
    known: dict[str, Any] = {
        "task": task,
        "version": 1,
        "index": index,
        "example_seed": index,
        "length": 1000,
        "protocol": "aware",
        "policy": policy,
        "budget": budget,
        "allocation": "uniform",
        "store": "auto",
        "options": {},
        "prompt_tokens": 1001,
        "compressed_tokens": 1000,
        "rows": round(1000 * share),
        "kv_bytes": round(4000 * share),
        "exact_kv_bytes": 4000,
        "score": math.fsum(turns) / len(turns),
        "turn_scores": tuple(turns),
        "answers": ("a",) * len(turns),
        "expected": (("a",),) * len(turns),
    }
    return TaskRecord(**{**known, **changes})


def some_tasks(examples: int = 4, **changes: Any) -> list[TaskRecord]:
    """Every task, policy and budget, and the full cache, whose score is 1."""
    records = []
    for task in TASKS:
        several = 3 if task == "multi-turn" else 1
        for index in range(examples):
            records.append(a_task(task, index, "none", "100%", (1.0,) * several, **changes))
            for policy, scores in SCORES.items():
                for budget, score in zip(BUDGETS, scores, strict=True):
                    right = float(index < score * examples)
                    turns = (right,) * several
                    records.append(a_task(task, index, policy, budget, turns, **changes))
    return records


def some_fidelity(stretches: int = 3, continuation: int = 64, **changes: Any) -> list[Record]:
    """A text under two policies at two budgets, and the full cache."""
    records: list[Record] = []
    for index in range(stretches):
        for policy, budget, level in (
            ("none", "100%", 0.0),
            ("span", "10%", 0.2),
            ("span", "50%", 0.05),
            ("snapkv", "10%", 0.3),
            ("snapkv", "50%", 0.1),
        ):
            kl = tuple(
                level * (1 + 0.5 * math.sin(n * 0.7 + index)) * (1 + n / continuation)
                for n in range(continuation)
            )
            exact = (2.0,) * continuation
            record = FidelityRecord(
                text="digest",
                text_name="a text.txt",
                index=index,
                length=1000,
                continuation=continuation,
                policy=policy,
                budget=budget,
                allocation="uniform",
                store="auto",
                options={},
                compressed_tokens=999,
                rows=round(999 * BUDGETS.get(budget, 1.0)),
                kv_bytes=round(4000 * BUDGETS.get(budget, 1.0)),
                exact_kv_bytes=4000,
                kl=math.fsum(kl) / continuation,
                agreement=1 - level,
                perplexity=math.exp(2 + level),
                exact_perplexity=math.exp(2),
                kl_curve=kl,
                agreement_curve=tuple(int(n % 10 >= 10 * level) for n in range(continuation)),
                loss_curve=tuple(2.0 + value for value in kl),
                exact_loss_curve=exact,
            )
            records.append(dataclasses.replace(record, **changes))
    return records


def some_harness() -> list[Record]:
    return [
        HarnessRecord(
            task="hellaswag", lm_eval="0.4.13", limit=100, shots=None, policy=policy,
            budget=budget, allocation="uniform", store="auto", options={},
            metrics={"acc,none": value, "acc_stderr,none": 0.05},
        )
        for policy, budget, value in (("none", "100%", 0.4), ("span", "25%", 0.38))
    ]  # fmt: skip


def some_results(*records: Record, **header: Any) -> Results:
    """Everything at once, or the given records."""
    everything = [
        *some_tasks(),
        *some_tasks(protocol="agnostic"),
        *some_fidelity(),
        *some_harness(),
    ]
    return Results(a_header(**header), tuple(records or everything))


class Elements(HTMLParser):
    """Elements of a page with their attributes, and the cells of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


def cells(table: list[list[str]]) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in table}
