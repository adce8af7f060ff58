"""Which needle prompts are asked: tasks, and two seed sets that share no text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvkeep.haystack import (
    CountTokens,
    Haystack,
    NeedlePrompt,
    filler,
    library_prose,
    needle_prompts,
)


@dataclass(frozen=True)
class Task:
    """One kind of prompt.

    Attributes:
        haystack: "prose" or "filler".
        kind: kind of value, as in `kvkeep.haystack.KINDS`.
        n_keys: needles in all, of which one is asked for.
    """

    haystack: str
    kind: str
    n_keys: int = 1

    def __str__(self) -> str:
        return f"{self.haystack}, {self.kind}" + (
            "" if self.n_keys == 1 else f", 1 of {self.n_keys}"
        )


@dataclass(frozen=True)
class SeedSet:
    """Prompts to choose a setting on, or to report it on; never both.

    Attributes:
        name: "choose" or "report".
        first_seed: the seeds go up from here.
        part: which half of the prose the documents are drawn from.
        tasks: what is asked.
    """

    name: str
    first_seed: int
    part: int
    tasks: tuple[Task, ...]

    def prompts(
        self, task: Task, count: int, n_tokens: int, count_tokens: CountTokens
    ) -> Iterator[NeedlePrompt]:
        """`count` prompts of a task, their needles at depths spread over the document."""
        return needle_prompts(
            count_tokens,
            count,
            n_tokens,
            kind=task.kind,
            seed=self.first_seed,
            haystack=self._haystack(task),
            n_keys=task.n_keys,
        )

    def _haystack(self, task: Task) -> Haystack:
        return filler() if task.haystack == "filler" else library_prose().part(self.part, 2)


_BOTH = (
    Task("prose", "number"),
    Task("prose", "word"),
    Task("prose", "words"),
    Task("prose", "number", n_keys=4),
    Task("filler", "number"),
    Task("filler", "short-number", n_keys=4),
)
#: Chosen on: every seed below 100,000.
CHOOSE = SeedSet("choose", 1_000, 0, _BOTH)
#: Reported on: other seeds, the other half of the prose, and tasks that chose nothing.
REPORT = SeedSet(
    "report", 500_000, 1, (*_BOTH, Task("prose", "name"), Task("prose", "short-number", n_keys=4))
)
SETS = {chosen.name: chosen for chosen in (CHOOSE, REPORT)}
