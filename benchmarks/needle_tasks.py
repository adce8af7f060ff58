"""Which needle prompts are asked: tasks, and two seed sets that share no text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

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
        tail: what follows the question: a short window that looks at the prompt's end then
            sees an instruction instead of the question.
    """

    haystack: str
    kind: str
    n_keys: int = 1
    tail: str = ""

    def __str__(self) -> str:
        similar = "" if self.n_keys == 1 else f", 1 of {self.n_keys}"
        tail = f", {len(self.tail.split())} words after" if self.tail else ""
        return f"{self.haystack}, {self.kind}{similar}{tail}"


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
        prompts = needle_prompts(
            count_tokens,
            count,
            n_tokens,
            kind=task.kind,
            seed=self.first_seed,
            haystack=self._haystack(task),
            n_keys=task.n_keys,
        )
        for prompt in prompts:
            yield replace(prompt, question=" ".join(filter(None, (prompt.question, task.tail))))

    def _haystack(self, task: Task) -> Haystack:
        return filler() if task.haystack == "filler" else library_prose().part(self.part, 2)


_BOTH = (
    Task("prose", "number"),
    Task("prose", "word"),
    Task("prose", "words"),
    Task("prose", "number", n_keys=4),
    Task("prose", "short-number", n_keys=4),
    Task("filler", "number"),
    Task("filler", "short-number", n_keys=4),
)
_SHORT, _LONG = (
    "Answer in one short sentence and do not explain anything.",
    "Answer in one short sentence. If the text does not contain the answer, say that you do not"
    " know. Write plain English without lists, headings or quotations, and keep a friendly and"
    " polite tone from the first word to the last.",
)
_OTHER_SHORT, _OTHER_LONG = (
    "Say only the answer itself, without any other words.",
    "Keep the answer as short as you can, in plain words, without any list or heading. If you are"
    " not sure about it, say so honestly, and never make up anything that the text above does not"
    " say.",
)


def _with_tails(*tails: str) -> tuple[Task, ...]:
    return tuple(Task("prose", kind, tail=tail) for tail in tails for kind in ("number", "words"))


#: Chosen on: every seed below 100,000.
CHOOSE = SeedSet("choose", 1_000, 0, (*_BOTH, *_with_tails(_SHORT, _LONG)))
#: Reported on: other seeds, the other half of the prose, and tasks that chose nothing.
REPORT = SeedSet(
    "report",
    500_000,
    1,
    (
        *_BOTH,
        Task("prose", "name"),
        *_with_tails(_OTHER_SHORT, _OTHER_LONG),
    ),
)
SETS = {chosen.name: chosen for chosen in (CHOOSE, REPORT)}
