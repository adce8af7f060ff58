"""Needle prompts: a document with one fact to find, the question, and the answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from kvkeep.errors import ConfigError
from kvkeep.haystack.filling import CountTokens, Hidden, filled, spread_depths
from kvkeep.haystack.text import Haystack, library_prose
from kvkeep.haystack.values import KINDS, PLACES, ValueKind
from kvkeep.spec import checked_count, named


@dataclass(frozen=True)
class Needle:
    """A fact that is hidden in a document.

    Attributes:
        place: what it is about, such as "the harbour office".
        values: its value, or its several values in the order in which they are said.
        hidden: where they are said, one place per value.
    """

    place: str
    values: tuple[str, ...]
    hidden: tuple[Hidden, ...]


@dataclass(frozen=True)
class NeedlePrompt:
    """A long document, a question about it, and what a right answer says.

    Attributes:
        document: the text, needles included.
        question: asks for one needle.
        answer: the exact right answer, without quotation marks around it.
        answer_prefix: what an answer begins with; `answer` goes on from there, without a gap.
        needles: the one asked for first, then the ones that only look like it.
        depth: share of the document in front of the needle asked for (its first value).
        kind: kind of value, a key of `KINDS`.
        haystack: name of the text around it.
        seed: everything was drawn with it.
    """

    document: str
    question: str
    answer: str
    answer_prefix: str
    needles: tuple[Needle, ...]
    depth: float
    kind: str
    haystack: str
    seed: int

    @property
    def prompt(self) -> str:
        """The document, then the question."""
        return f"{self.document}\n\n{self.question}"

    @property
    def answered(self) -> str:
        """The right answer in full: prefix and answer."""
        return self.answer_prefix + self.answer


def needle_prompt(
    count_tokens: CountTokens,
    n_tokens: int = 1000,
    *,
    kind: str = "number",
    depth: float = 0.5,
    seed: int = 0,
    haystack: Haystack | None = None,
    n_keys: int = 1,
    n_values: int = 1,
) -> NeedlePrompt:
    """Hide a fact in a document and ask for it.

    The needle asked for stands in the document once, and nothing else there has its value
    or its place.

    Args:
        count_tokens: number of tokens of a text.
        n_tokens: tokens of the document, at most; it falls short by less than a sentence.
        kind: "number" (7 digits), "short-number" (4 digits), "word", "words" (three),
            "name" or "uuid".
        depth: where the needle goes: 0 is the start, 1 the end.
        seed: draws values, places, and the haystack's order.
        haystack: text around it; None is `library_prose()`.
        n_keys: needles in all; more than 1 hides others of the same form about other
            places, at depths spread over the document.
        n_values: values of the needle asked for, each in a sentence of its own; the answer
            is all of them in the order of the document.

    Raises:
        ConfigError: an argument is out of range, or the document is too short for it.
    """
    value_kind = named("kind of needle", kind, KINDS)
    keys = checked_count("n_keys", n_keys, 1)
    several = checked_count("n_values", n_values, 1)
    if keys > len(PLACES):
        raise ConfigError("too many needles", expected=f"at most {len(PLACES)}", received=f"{keys}")
    text = library_prose() if haystack is None else haystack
    draw = random.Random(f"kvkeep needle {kind} {seed}")
    places = draw.sample(PLACES, keys)
    values = _distinct_values(value_kind, several + keys - 1, draw)
    # The others lie on both sides of the one asked for, wherever that is.
    others = [(depth + shift) % 1.0 for shift in _shifts(several + keys - 2, draw)]
    own = [depth, *sorted(others[: several - 1])]
    depths = [*sorted(own), *others[several - 1 :]]
    owners = [0] * several + list(range(1, keys))
    sentences = [
        (_sentence(value_kind, places[owner], value), at)
        for owner, value, at in zip(owners, values, depths, strict=True)
    ]
    document, hidden = filled(
        count_tokens,
        n_tokens,
        text,
        sentences,
        seed=seed,
        avoid=[*values, *(place.removeprefix("the ") for place in places)],
    )
    # The order of the document is the order of the answer.
    order = sorted(range(several), key=lambda index: hidden[index].start)
    asked = Needle(places[0], tuple(values[i] for i in order), tuple(hidden[i] for i in order))
    similar = tuple(
        Needle(places[key], (values[several + key - 1],), (hidden[several + key - 1],))
        for key in range(1, keys)
    )
    question, prefix = _question(value_kind, places[0], several)
    return NeedlePrompt(
        document=document,
        question=question,
        answer=_listed(value_kind, asked.values),
        answer_prefix=prefix,
        needles=(asked, *similar),
        depth=asked.hidden[0].depth,
        kind=kind,
        haystack=text.name,
        seed=seed,
    )


def needle_prompts(
    count_tokens: CountTokens,
    count: int,
    n_tokens: int = 1000,
    *,
    kind: str = "number",
    seed: int = 0,
    haystack: Haystack | None = None,
    n_keys: int = 1,
    n_values: int = 1,
) -> Iterator[NeedlePrompt]:
    """`count` prompts with seeds `seed`, `seed + 1`, … and depths spread evenly.

    Raises:
        ConfigError: as in `needle_prompt`, or `count` is below 1.
    """
    for index, depth in enumerate(spread_depths(count, seed)):
        yield needle_prompt(
            count_tokens,
            n_tokens,
            kind=kind,
            depth=depth,
            seed=seed + index,
            haystack=haystack,
            n_keys=n_keys,
            n_values=n_values,
        )


def _distinct_values(kind: ValueKind, count: int, draw: random.Random) -> list[str]:
    """Values of which none is part of another."""
    values: list[str] = []
    for _ in range(1000 * count):
        if len(values) == count:
            break
        value = kind.draw(draw)
        if not any(value in other or other in value for other in values):
            values.append(value)
    if len(values) < count:
        raise ConfigError(
            f"there are not {count} different values of kind {kind.name!r}",
            expected="fewer needles",
        )
    return values


def _shifts(count: int, draw: random.Random) -> list[float]:
    """`count` distances from the needle asked for, evenly apart, in a drawn order."""
    shifts = [(index + 1) / (count + 1) for index in range(count)]
    draw.shuffle(shifts)
    return shifts


def _sentence(kind: ValueKind, place: str, value: str) -> str:
    return f"The {kind.noun} of {place} is {_quoted(kind, value)}."


def _question(kind: ValueKind, place: str, values: int) -> tuple[str, str]:
    """The question, and what an answer begins with."""
    mark = '"' if kind.quoted else ""
    if values == 1:
        question = f"{kind.asked} is the {kind.noun} of {place}?"
        return question, f"The {kind.noun} of {place} is {mark}"
    return (
        f"There are {values} {kind.noun}s of {place}. {kind.asked} are they, in the order of the"
        " text?",
        f"The {kind.noun}s of {place} are {mark}",
    )


def _listed(kind: ValueKind, values: tuple[str, ...]) -> str:
    """What follows the prefix: the mark that opens the first value is in it, none ends the last."""
    if len(values) == 1:
        return values[0]
    said = [_quoted(kind, value) for value in values]
    text = f"{', '.join(said[:-1])} and {said[-1]}"
    return text[1:-1] if kind.quoted else text


def _quoted(kind: ValueKind, value: str) -> str:
    return f'"{value}"' if kind.quoted else value
