"""Which prompts a run asks: tasks, lengths, how many, drawn with what."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.errors import ConfigError
from kvkeep.evaluation.examples import Example
from kvkeep.evaluation.rendering import fitted
from kvkeep.evaluation.tasks import TASKS, task_of
from kvkeep.haystack import Haystack, library_prose
from kvkeep.spec import checked_count

_LENGTH = re.compile(r"^\s*(\d{1,9})\s*(k?)\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Questions:
    """The prompts of a run.

    Attributes:
        tasks: names, in the order asked.
        lengths: tokens of the rendered first prompt, at most.
        limit: examples per task and length.
        seed: of every draw.

    Raises:
        ConfigError: a task is unknown, or a number is out of range.
    """

    tasks: tuple[str, ...] = tuple(TASKS)
    lengths: tuple[int, ...] = (1000,)
    limit: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.tasks:
            task_of(name)
        for length in self.lengths:
            checked_count("length", length, 1)
        checked_count("limit", self.limit, 1)
        checked_count("seed", self.seed, 0)

    @property
    def count(self) -> int:
        """How many examples there are."""
        return len(self.tasks) * len(self.lengths) * self.limit

    def __iter__(self) -> Iterator[Asked]:
        """All prompts, those of small index first: what an early stop leaves is even."""
        for index in range(self.limit):
            for length in self.lengths:
                for name in self.tasks:
                    yield Asked(name, length, index, self.seed)

    def examples(self, tokenizer: Any, prose: Haystack | None = None) -> Iterator[Example]:
        """All prompts, drawn.

        Raises:
            ConfigError: a length has no room for a task.
        """
        for asked in self:
            yield asked.example(tokenizer, prose)


@dataclass(frozen=True)
class Asked:
    """One prompt of a run, not yet drawn.

    Attributes:
        task, length, index, seed: as in `Questions`.
    """

    task: str
    length: int
    index: int
    seed: int

    def example(self, tokenizer: Any, prose: Haystack | None = None) -> Example:
        """Draw it.

        Raises:
            ConfigError: the length has no room for the task.
        """
        return fitted(
            tokenizer,
            task_of(self.task),
            self.index,
            length=self.length,
            seed=self.seed,
            prose=prose,
        )


def parse_length(text: str) -> int:
    """A number of tokens: "1000", or "4k" for 4,000.

    Raises:
        ConfigError: it is neither.
    """
    match = _LENGTH.match(text)
    if match is None or int(match[1]) == 0:
        raise ConfigError("bad length", expected='tokens, such as "1000" or "4k"', received=text)
    return int(match[1]) * (1000 if match[2] else 1)


def prose_digest(prose: Haystack | None = None) -> str:
    """What tells one running text from another: 16 hex digits over its name and sentences."""
    text = library_prose() if prose is None else prose
    digest = hashlib.sha256(text.name.encode())
    for paragraph in text.paragraphs:
        digest.update(b"\n\n" + "\n".join(paragraph).encode())
    return digest.hexdigest()[:16]


def split_names(text: str) -> tuple[str, ...]:
    """Names or numbers parted by commas, each once, in their order.

    Raises:
        ConfigError: there is none.
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise ConfigError("an empty list", expected="names parted by commas", received=repr(text))
    return names


def listed(values: Sequence[object]) -> str:
    """`a,b,c`, as the flags take it."""
    return ",".join(map(str, values))
