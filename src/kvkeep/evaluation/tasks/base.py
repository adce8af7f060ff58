"""What a task is: a name, a version, and a pure maker of its prompts' parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvkeep.evaluation.examples import Turn
from kvkeep.haystack import CountTokens, Haystack


@dataclass(frozen=True)
class Draft:
    """What a maker is told.

    Attributes:
        count_tokens: number of tokens of a text.
        n_tokens: tokens of the document, at most.
        seed: of everything that is drawn.
        depth: where in the document the thing asked for goes, in (0, 1).
        prose: running text to hide things in.
    """

    count_tokens: CountTokens
    n_tokens: int
    seed: int
    depth: float
    prose: Haystack


@dataclass(frozen=True)
class Parts:
    """A document and what is asked about it.

    Attributes:
        document: at most `Draft.n_tokens` tokens.
        turns: at least one.
        instruction: stands before the document.
        details: facts for the record.
    """

    document: str
    turns: tuple[Turn, ...]
    instruction: str = ""
    details: Mapping[str, str | int | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A kind of prompt.

    A maker draws what it draws from the seed before it looks at `n_tokens`, so that
    examples of one index ask the same question at every length.

    Attributes:
        name: what flags and tables call it.
        version: raised whenever the same seed gives other prompts or scores.
        summary: one line for people.
        source: what it follows.
        scoring: name of the scoring rule.
        max_tokens: of an answer.
        make: the maker.
    """

    name: str
    version: int
    summary: str
    source: str
    scoring: str
    max_tokens: int
    make: Callable[[Draft], Parts]
