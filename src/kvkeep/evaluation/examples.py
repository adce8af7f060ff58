"""One prompt of a task, before a chat template and a tokenizer touch it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: Between a document and what is asked about it.
GAP = "\n\n"


@dataclass(frozen=True)
class Turn:
    """A question about a document, and what a right answer says.

    Attributes:
        question: what the user asks; empty where the task stands before the document.
        answers: the strings to be found in an answer (which of them, says the task's rule).
        answer_prefix: how the answer begins; it is given, and the model goes on from there.
        gold: how a right answer goes on after the prefix; what later turns see of this one.
    """

    question: str
    answers: tuple[str, ...]
    answer_prefix: str
    gold: str


@dataclass(frozen=True)
class Example:
    """A prompt of a task: instruction and document, then one or several questions.

    Attributes:
        task, version: of the task; numbers of two versions are not comparable.
        index: which of the task's examples, from 0.
        seed: what this example was drawn with.
        length: tokens of the rendered first prompt, at most.
        instruction: stands before the document; may be empty.
        document: the text.
        turns: at least one.
        scoring: name of the scoring rule.
        max_tokens: of an answer.
        details: further facts (kind of value, depth, …) for whoever reads the records.
    """

    task: str
    version: int
    index: int
    seed: int
    length: int
    instruction: str
    document: str
    turns: tuple[Turn, ...]
    scoring: str
    max_tokens: int
    details: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def context(self) -> str:
        """What the query-agnostic protocol compresses: instruction and document."""
        return GAP.join(part for part in (self.instruction, self.document) if part)

    @property
    def question(self) -> str:
        """The first question."""
        return self.turns[0].question
