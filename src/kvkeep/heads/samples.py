"""Texts with passkeys as tokens: what is read, what is recalled, and where it stood."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.errors import HeadProfileError
from kvkeep.haystack import Haystack, PasskeyPrompt, passkey_prompt


@dataclass(frozen=True)
class Recall:
    """One passkey, as token positions.

    Attributes:
        needle: [start, stop) where it stands in the text.
        answer: [start, stop) where it is recalled.
    """

    needle: tuple[int, int]
    answer: tuple[int, int]


@dataclass(frozen=True)
class Sample:
    """A text whose end recalls passkeys of its beginning.

    Attributes:
        tokens: the whole text.
        recall_start: the first token of the part that recalls.
        recalls: the passkeys.
    """

    tokens: tuple[int, ...]
    recall_start: int
    recalls: tuple[Recall, ...]

    @property
    def labels(self) -> list[int]:
        """Positions whose next token is part of a recalled passkey."""
        return [p - 1 for recall in self.recalls for p in range(*recall.answer)]


#: index of a sample -> the sample.
MakeSample = Callable[[int], Sample]
#: What passkeys are made of; "both" is words and numbers in turn.
KINDS = ("both", "words", "numbers")


def passkey_samples(
    tokenizer: Any,
    length: int,
    *,
    passkeys: int,
    words: int,
    seed: int,
    kind: str = "both",
    haystack: Haystack | None = None,
) -> MakeSample:
    """Passkey texts of about `length` tokens, each drawn from (seed, its index).

    Args:
        tokenizer: mlx-lm's wrapper, or whatever has `encode(text, add_special_tokens=)` and
            `decode`.
        length: tokens, recall included. Passkeys of words do not exceed it; numbers may be
            longer than the words they stand for.
        passkeys, words: how many passkeys, and words (or digits) in each.
        kind: one of `KINDS`. Heads that copy words are not quite those that copy digits.
    """

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    def make(index: int) -> Sample:
        drawn = seed * 1_000_003 + index
        prompt = passkey_prompt(
            count, length, n_passkeys=passkeys, n_words=words, seed=drawn, haystack=haystack
        )
        if kind == "words" or (kind == "both" and index % 2 == 0):
            return as_sample(prompt, tokenizer)
        draw = random.Random(f"kvkeep passkey numbers {drawn}")
        numbers = ["".join(draw.choices("0123456789", k=words)) for _ in range(passkeys)]
        return as_sample(prompt, tokenizer, numbers)

    return make


def as_sample(
    prompt: PasskeyPrompt, tokenizer: Any, instead: Sequence[str] | None = None
) -> Sample:
    """A passkey prompt as tokens.

    The text is encoded in pieces that begin and end at the passkeys, so that each passkey
    is whole tokens, wherever the tokenizer would have put borders; a passkey takes the
    space in front of it along.

    Args:
        prompt: the text.
        tokenizer: as in `passkey_samples`.
        instead: what is said in place of each passkey, if anything.

    Raises:
        HeadProfileError: a passkey has no tokens.
    """
    spans = [(start, stop, False, i) for i, (start, stop) in enumerate(prompt.context_spans)]
    spans += [(start, stop, True, i) for i, (start, stop) in enumerate(prompt.recall_spans)]
    tokens: list[int] = list(_beginning(tokenizer))
    found: dict[tuple[bool, int], tuple[int, int]] = {}
    at = recall_start = 0

    def add(stop: int, other: str | None = None) -> None:
        nonlocal at
        text = prompt.text[at:stop]
        if other is not None:
            text = f" {other}" if text.startswith(" ") else other
        tokens.extend(tokenizer.encode(text, add_special_tokens=False))
        at = stop

    for start, stop, recalled, index in sorted(spans):
        if recalled and not recall_start:
            add(prompt.recall_start)
            recall_start = len(tokens)
        add(start - 1 if prompt.text[start - 1] == " " else start)
        first = len(tokens)
        add(stop, None if instead is None else instead[index])
        found[recalled, index] = (first, len(tokens))
        if first == len(tokens):
            raise HeadProfileError(
                "the tokenizer makes nothing of a passkey",
                expected="a tokenizer for English words",
                received=prompt.passkeys[index],
            )
    recalls = [Recall(found[False, i], found[True, i]) for i in range(len(prompt.passkeys))]
    return Sample(tuple(tokens), recall_start, tuple(recalls))


def _beginning(tokenizer: Any) -> list[int]:
    """The tokens that the tokenizer puts in front of every text."""
    return list(tokenizer.encode(""))
