"""Means of records with 95 % intervals, as typed values for tables and reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvkeep.evaluation.records import FidelityRecord, HarnessRecord, Record, TaskRecord
from kvkeep.evaluation.settings import NONE, Setting
from kvkeep.evaluation.tasks import TASKS

#: The row over all tasks.
ALL_TASKS = "all tasks"
_Z = 1.959964  # of 95 %
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Interval:
    """A mean and what it may be.

    Attributes:
        mean: of `count` values.
        low, high: ends of a 95 % interval.
        count: how many.
    """

    mean: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class TaskSummary:
    """A task under one setting.

    Attributes:
        task: its name, or `ALL_TASKS`.
        length, protocol: of its prompts.
        setting: what evicted.
        score: mean score of the examples.
        exact: mean score of the full cache on the same examples, or None where it was not
            asked for some of them.
        rows: share of the compressed rows that stayed.
        nbytes: share of the K/V bytes that stayed.
        turns: scores per turn, where every example has the same number of several turns.
    """

    task: str
    length: int
    protocol: str
    setting: Setting
    score: Interval
    exact: float | None
    rows: float
    nbytes: float
    turns: tuple[Interval, ...] = ()


@dataclass(frozen=True)
class FidelitySummary:
    """A text under one setting.

    Attributes:
        text: name of the text.
        length: tokens before eviction.
        continuation: N.
        setting: what evicted.
        kl: mean over the stretches, nats.
        agreement: mean share of equal most likely tokens.
        perplexity, exact_perplexity: over all positions of all stretches.
        rows, nbytes: as in `TaskSummary`.
        kl_curve, agreement_curve: means per position.
        loss_curve: mean loss minus that of the exact cache per position.
    """

    text: str
    length: int
    continuation: int
    setting: Setting
    kl: Interval
    agreement: Interval
    perplexity: float
    exact_perplexity: float
    rows: float
    nbytes: float
    kl_curve: tuple[float, ...]
    agreement_curve: tuple[float, ...]
    loss_curve: tuple[float, ...]


@dataclass(frozen=True)
class Summary:
    """All of a file's records.

    Attributes:
        tasks: by protocol, length, task (`ALL_TASKS` last) and setting.
        fidelity: by text, length and setting.
        harness: records of lm-evaluation-harness as they are.
    """

    tasks: tuple[TaskSummary, ...]
    fidelity: tuple[FidelitySummary, ...]
    harness: tuple[HarnessRecord, ...] = ()


def summarise(records: Iterable[Record]) -> Summary:
    """Means by task, length, protocol and setting; and by text, length and setting."""
    held = list(records)
    tasks = [record for record in held if isinstance(record, TaskRecord)]
    texts = [record for record in held if isinstance(record, FidelityRecord)]
    exact = {_example(r): r.score for r in tasks if r.policy == NONE}
    found = []
    for (protocol, length), block in _grouped(tasks, lambda r: (r.protocol, r.length)):
        by_task = _grouped(block, lambda r: r.task)
        by_task.sort(key=lambda pair: _rank(pair[0]))
        if len(by_task) > 1:
            by_task.append((ALL_TASKS, block))
        for task, some in by_task:
            for _, of_setting in _grouped(some, lambda r: r.setting.key):
                found.append(_task(task, length, protocol, of_setting, exact))
    blocks = _grouped(texts, lambda r: (r.text, r.length, r.continuation, r.setting.key))
    return Summary(
        tasks=tuple(found),
        fidelity=tuple(_fidelity(block) for _, block in blocks),
        harness=tuple(record for record in held if isinstance(record, HarnessRecord)),
    )


def wilson(values: Sequence[float]) -> Interval:
    """The Wilson score interval of a mean of values in [0, 1].

    For 0 and 1 it is the interval of a proportion (Wilson 1927). Values in between never
    vary more than 0 and 1 of the same mean, so for them it is wider than it had to be.

    Raises:
        ValueError: there are no values.
    """
    count = len(values)
    if not count:
        raise ValueError("a mean of no values")
    mean, z2 = math.fsum(values) / count, _Z * _Z
    centre = (mean + z2 / (2 * count)) / (1 + z2 / count)
    spread = _Z / (1 + z2 / count)
    spread *= math.sqrt(mean * (1 - mean) / count + z2 / (4 * count * count))
    return Interval(mean, max(centre - spread, 0.0), min(centre + spread, 1.0), count)


def normal(values: Sequence[float]) -> Interval:
    """The normal interval of a mean; of a single value it is that value.

    Raises:
        ValueError: there are no values.
    """
    count = len(values)
    if not count:
        raise ValueError("a mean of no values")
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, mean, mean, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    spread = _Z * math.sqrt(variance / count)
    return Interval(mean, mean - spread, mean + spread, count)


def _task(
    task: str,
    length: int,
    protocol: str,
    records: Sequence[TaskRecord],
    exact: dict[tuple[object, ...], float],
) -> TaskSummary:
    full = [exact.get(_example(record)) for record in records]
    known = [value for value in full if value is not None]
    return TaskSummary(
        task=task,
        length=length,
        protocol=protocol,
        setting=records[0].setting,
        score=wilson([record.score for record in records]),
        exact=_mean(known) if len(known) == len(full) else None,
        rows=_mean([r.rows / r.compressed_tokens for r in records]),
        nbytes=_mean([r.kv_bytes / max(r.exact_kv_bytes, 1) for r in records]),
        turns=_turns([record.turn_scores for record in records]),
    )


def _turns(scores: Sequence[Sequence[float]]) -> tuple[Interval, ...]:
    counts = {len(turns) for turns in scores}
    several = len(counts) == 1 and counts != {1}
    return tuple(wilson(turn) for turn in zip(*scores, strict=True)) if several else ()


def _fidelity(records: Sequence[FidelityRecord]) -> FidelitySummary:
    first = records[0]
    return FidelitySummary(
        text=first.text_name,
        length=first.length,
        continuation=first.continuation,
        setting=first.setting,
        kl=normal([record.kl for record in records]),
        agreement=wilson([record.agreement for record in records]),
        perplexity=math.exp(_mean([x for r in records for x in r.loss_curve])),
        exact_perplexity=math.exp(_mean([x for r in records for x in r.exact_loss_curve])),
        rows=_mean([r.rows / r.compressed_tokens for r in records]),
        nbytes=_mean([r.kv_bytes / max(r.exact_kv_bytes, 1) for r in records]),
        kl_curve=_means([r.kl_curve for r in records]),
        agreement_curve=_means([r.agreement_curve for r in records]),
        loss_curve=_means(
            [
                [a - b for a, b in zip(r.loss_curve, r.exact_loss_curve, strict=True)]
                for r in records
            ]
        ),
    )


def _grouped(values: Iterable[T], key: Callable[[T], K]) -> list[tuple[K, list[T]]]:
    """Values by key, keys in the order of their first appearance."""
    groups: dict[K, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return list(groups.items())


def _example(record: TaskRecord) -> tuple[object, ...]:
    return record.task, record.length, record.index, record.protocol


def _rank(task: str) -> int:
    names = list(TASKS)
    return names.index(task) if task in names else len(names)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _means(curves: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(_mean(column) for column in zip(*curves, strict=True))
