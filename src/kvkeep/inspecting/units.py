"""Tokens as pieces of text that can be drawn one by one."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_UNKNOWN = "\ufffd"  # what a decoder writes for bytes that make no character, or none yet
_JOINER = "\u200d"
# A character has at most 4 bytes; more tokens without one are broken text, drawn as it comes.
_MOST_PENDING = 16
# Marks may pile up on a letter without end.
_MOST_JOINED = 64


@dataclass(frozen=True)
class TextUnit:
    """A piece of text that cannot be drawn in parts, and how many tokens made it.

    Attributes:
        text: may be empty, for a token that decodes to nothing.
        tokens: at least 1.
    """

    text: str
    tokens: int


def text_units(tokenizer: Any, tokens: Sequence[int]) -> tuple[TextUnit, ...]:
    """Decode token by token; tokens that share a character are one unit.

    So are those of one visible character: letter and combining marks, parts of a joined
    emoji, the two letters of a flag. The texts put together are the decoded prompt, and the
    tokens add up to T.

    Args:
        tokenizer: has `decode`.
        tokens: T token ids.
    """
    units: list[TextUnit] = []
    for unit in _decoded(_decoder(tokenizer), list(tokens)):
        last = units[-1] if units else None
        if last is not None and last.tokens < _MOST_JOINED and _joins(last.text, unit.text):
            units[-1] = TextUnit(last.text + unit.text, last.tokens + unit.tokens)
        else:
            units.append(unit)
    return tuple(units)


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """Ids to text as it is, without the spaces before punctuation being tidied away."""
    try:
        tokenizer.decode([], clean_up_tokenization_spaces=False)
    except TypeError:  # a tokenizer that does not know the option
        return tokenizer.decode
    return lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def _decoded(decode: Callable[[list[int]], str], tokens: list[int]) -> list[TextUnit]:
    """Units of whole characters.

    Each is decoded behind the one before it: some tokenizers drop the space at the start of
    what they decode.
    """
    units: list[TextUnit] = []
    context = start = 0
    for stop in range(1, len(tokens) + 1):
        before = decode(tokens[context:start]) if start > context else ""
        text = decode(tokens[context:stop])[len(before) :]
        waiting = not text or text.endswith(_UNKNOWN)
        if waiting and stop < len(tokens) and stop - start < _MOST_PENDING:
            continue
        units.append(TextUnit(text, stop - start))
        context, start = start, stop
    return units


def _joins(before: str, after: str) -> bool:
    """Whether the first character of `after` is drawn as part of the last one of `before`."""
    if not before or not after or before[-1] == "\n":
        return False
    first = after[0]
    if before[-1] == _JOINER or first == _JOINER or unicodedata.category(first) in _MARKS:
        return True
    if _is_skin_tone(first):
        return True
    flags = len(before) - len(before.rstrip(_FLAG_LETTERS))
    return first in _FLAG_LETTERS and flags % 2 == 1


_MARKS = ("Mn", "Mc", "Me")
_FLAG_LETTERS = "".join(map(chr, range(0x1F1E6, 0x1F200)))


def _is_skin_tone(character: str) -> bool:
    return 0x1F3FB <= ord(character) <= 0x1F3FF
