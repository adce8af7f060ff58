"""Tasks by name. Adding one: its file, and its line here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType

from kvkeep.evaluation.examples import Example
from kvkeep.evaluation.tasks import needles, questions, variables, words
from kvkeep.evaluation.tasks.base import Draft, Task
from kvkeep.haystack import CountTokens, Haystack, library_prose
from kvkeep.spec import checked_count, named

_ALL = (
    needles.single("number", in_filler=True),
    needles.single("number"),
    needles.single("uuid"),
    needles.multi_key("short-number", 4),
    needles.multi_value("short-number", 2),
    needles.multi_query("short-number", 4, 2),
    variables.variable_tracking(2),
    words.common_words(3, 20, 2),
    words.frequent_words(3, 2.0),
    questions.one_hop(),
    questions.two_hops(),
    needles.multi_turn("short-number", 3),
    needles.instruction_first("number"),
)
#: Every task, in the order of tables.
TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in _ALL})

_GOLDEN = (5**0.5 - 1) / 2


def task_of(name: str) -> Task:
    """The task of that name.

    Raises:
        ConfigError: there is none; the message names the nearest one.
    """
    return named("task", name, TASKS)


def example_of(
    task: Task,
    index: int,
    *,
    length: int,
    n_tokens: int,
    count_tokens: CountTokens,
    seed: int = 0,
    prose: Haystack | None = None,
) -> Example:
    """One example of a task; the same arguments always give the same one.

    Its depth and its draws hang on `index` and `seed` alone, so a run of more examples begins
    with the examples of a shorter one, and lengths are asked the same questions.

    Args:
        index: from 0.
        length: what the example notes as its length.
        n_tokens: tokens of the document, at most.
        count_tokens: of a text.
        seed: of the whole run.
        prose: running text; None is that of the Python library.

    Raises:
        ConfigError: a number is out of range, or the document too short for the task.
    """
    at = checked_count("index", index, 0)
    own = _own_seed(task, checked_count("seed", seed, 0), at)
    parts = task.make(
        Draft(
            count_tokens=count_tokens,
            n_tokens=n_tokens,
            seed=own,
            depth=_depth(task, at, seed),
            prose=library_prose() if prose is None else prose,
        )
    )
    return Example(
        task=task.name,
        version=task.version,
        index=at,
        seed=own,
        length=length,
        instruction=parts.instruction,
        document=parts.document,
        turns=parts.turns,
        scoring=task.scoring,
        max_tokens=task.max_tokens,
        details=parts.details,
    )


def _own_seed(task: Task, seed: int, index: int) -> int:
    return _drawn(f"example {task.name} {task.version} {seed} {index}")


def _depth(task: Task, index: int, seed: int) -> float:
    """Depths of successive examples, spread evenly over (0, 1) however many there are."""
    start = _drawn(f"depth {task.name} {seed}") / 2**48
    return 0.02 + 0.96 * ((start + index * _GOLDEN) % 1.0)


def _drawn(text: str) -> int:
    return int.from_bytes(hashlib.sha256(f"kvkeep {text}".encode()).digest()[:6], "big")
