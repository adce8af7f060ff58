"""From answers to scores, and from scores to paired differences: one scorer for all sides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from peer_answers import Answer, Key, Prompt
from peer_plan import BUDGETS, FULL, OWN, PAIRS

from kvkeep.evaluation import FULL as FULL_CACHE
from kvkeep.evaluation import TaskRecord, read_results, score, variants_of

RESAMPLES = 10_000


@dataclass(frozen=True)
class Scored:
    """An answer and what it is worth.

    Attributes:
        answer: of some side.
        score: in [0, 1].
    """

    answer: Answer
    score: float


#: One side's answers.
Scores = Mapping[Key, Scored]


@dataclass(frozen=True)
class Difference:
    """Two settings on the same prompts.

    Attributes:
        ours, theirs: mean scores.
        mean: of the differences, ours - theirs.
        low, high: ends of a 95 % percentile bootstrap interval over the prompts.
        count: prompts.
        won, lost: prompts on which ours scored more, or less.
        same_text: prompts with the same answer, letter for letter.
        losses: (index, their answer, ours) of the prompts lost, of one task only.
    """

    ours: float
    theirs: float
    mean: float
    low: float
    high: float
    count: int
    won: int
    lost: int
    same_text: int
    losses: tuple[tuple[int, str, str], ...] = ()

    @property
    def verdict(self) -> str:
        """In words."""
        if self.high < 0:
            return "worse"
        if self.low > 0:
            return "better"
        if self.mean == 0:
            return "equal"
        return "lower, within noise" if self.mean < 0 else "higher, within noise"


@dataclass(frozen=True)
class Row:
    """A line of the side-by-side table.

    Attributes:
        name: of the pair, or of kvkeep's own setting.
        budget: as the plan spells it.
        task: its name; empty for all tasks.
        difference: the figures.
    """

    name: str
    budget: str
    task: str
    difference: Difference


def judged(answers: Iterable[Answer], prompts: Iterable[Prompt]) -> dict[Key, Scored]:
    """A peer's answers, scored by kvkeep's rules; those to other prompts are left out."""
    by_prompt = {(prompt.task, prompt.index): prompt for prompt in prompts}
    found = {}
    for answer in answers:
        prompt = by_prompt.get((answer.task, answer.index))
        if prompt is not None:
            right = score(answer.text, prompt.answers, prompt.scoring)
            found[answer.key] = Scored(answer, right)
    return found


def own_answers(path: Path) -> list[Answer]:
    """What `kvkeep eval` wrote, by the plan's names."""
    names: dict[str, list[str]] = {}
    for planned in (*PAIRS, *OWN):
        for variant in variants_of([planned.ours], BUDGETS):
            names.setdefault(variant.setting.key, []).append(planned.name)
    names[FULL_CACHE.setting.key] = [FULL]
    return [
        Answer(
            record.task,
            record.index,
            name,
            record.budget,
            record.answers[0],
            record.rows,
            record.kv_bytes,
        )
        for record in read_results(path).records
        if isinstance(record, TaskRecord)
        for name in names.get(record.setting.key, ())
    ]


def difference(
    ours: Scores, theirs: Scores, our_name: str, their_name: str, budget: str, task: str = ""
) -> Difference | None:
    """Two settings on the prompts that both answered; None where there is none.

    Args:
        ours, theirs: each side's answers.
        our_name, their_name: of the settings.
        budget: of both; the full cache has its own.
        task: only of that task.
    """
    pairs = []
    for key, scored in ours.items():
        if key[2:] != _where(our_name, budget) or (task and key[0] != task):
            continue
        other = theirs.get((*key[:2], *_where(their_name, budget)))
        if other is not None:
            pairs.append((scored, other))
    if not pairs:
        return None
    differences = [mine.score - other.score for mine, other in pairs]
    low, high = bootstrap(differences)
    losses = [
        (mine.answer.index, other.answer.text, mine.answer.text)
        for mine, other in pairs
        if mine.score < other.score
    ]
    return Difference(
        ours=_mean([mine.score for mine, _ in pairs]),
        theirs=_mean([other.score for _, other in pairs]),
        mean=_mean(differences),
        low=low,
        high=high,
        count=len(pairs),
        won=sum(value > 0 for value in differences),
        lost=len(losses),
        same_text=sum(a.answer.text.strip() == b.answer.text.strip() for a, b in pairs),
        losses=tuple(sorted(losses)) if task else (),
    )


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """A 95 % percentile interval of the mean over resampled prompts.

    Few equal values give an interval that is too narrow: four equal ones one of width 0.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("an interval of no values")
    array = np.asarray(values, np.float64)
    draws = np.random.default_rng(seed).integers(0, len(array), (RESAMPLES, len(array)))
    low, high = np.percentile(array[draws].mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def rows(ours: Scores, theirs: Scores, tasks: Sequence[str]) -> list[Row]:
    """Each pair at each budget: all tasks together (task ""), then task by task."""
    found = []
    for pair in PAIRS:
        for budget in BUDGETS:
            for task in ("", *tasks):
                value = difference(ours, theirs, pair.name, pair.name, budget, task)
                if value is not None:
                    found.append(Row(pair.name, budget, task, value))
    return found


def same_rows(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], name: str, budget: str
) -> float | None:
    """Share of the rows that both keep, of those that the side which keeps more keeps.

    Args:
        ours, theirs: bool [L, H_kv, T] by `rows_key`.
        name, budget: the setting.

    Returns:
        Over all prompts of both sides; None where there is none.
    """
    both = most = 0
    for key, mine in ours.items():
        if key.split(" | ")[1:] == [name, budget] and key in theirs:
            both += np.count_nonzero(mine & theirs[key])
            most += max(np.count_nonzero(mine), np.count_nonzero(theirs[key]))
    return float(both / most) if most else None


def best_of(theirs: Scores, budget: str) -> list[tuple[str, float]]:
    """Kvpress's settings at a budget with their mean over all prompts, best first."""
    found = []
    for pair in PAIRS:
        values = [s.score for key, s in theirs.items() if key[2:] == (pair.name, budget)]
        if values:
            found.append((pair.name, _mean(values)))
    return sorted(found, key=lambda item: (-item[1], item[0]))


def rate(scores: Scores, name: str, budget: str, task: str = "") -> float | None:
    """Mean score of a setting; None where it answered nothing."""
    values = [
        scored.score
        for key, scored in scores.items()
        if key[2:] == _where(name, budget) and (not task or key[0] == task)
    ]
    return _mean(values) if values else None


def mean_bytes(scores: Scores, name: str, budget: str) -> tuple[float, float] | None:
    """Mean rows that attention sees and mean bytes held; None where nothing was answered."""
    found = [s.answer for key, s in scores.items() if key[2:] == _where(name, budget)]
    if not found:
        return None
    return _mean([a.rows for a in found]), _mean([a.held_bytes for a in found])


def _where(name: str, budget: str) -> tuple[str, str]:
    return (name, "100%") if name == FULL else (name, budget)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
