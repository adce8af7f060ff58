"""Passkey recall: labelled text to train head gates on."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvkeep.haystack.filling import CountTokens, filled, spread_depths
from kvkeep.haystack.text import Haystack, library_prose
from kvkeep.haystack.values import WORDS
from kvkeep.spec import checked_count

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@dataclass(frozen=True)
class PasskeyPrompt:
    """A long text that hides passkeys and recalls them all at its end.

    Attributes:
        text: document and recall.
        passkeys: in the order in which they are recalled.
        context_spans: characters [start, stop) of each passkey in the document.
        recall_spans: the same where it is recalled: the tokens to take a loss on.
        recall_start: the character at which the recall begins; the document is before it.
        seed: everything was drawn with it.
    """

    text: str
    passkeys: tuple[str, ...]
    context_spans: tuple[tuple[int, int], ...]
    recall_spans: tuple[tuple[int, int], ...]
    recall_start: int
    seed: int


def passkey_prompt(
    count_tokens: CountTokens,
    n_tokens: int = 1000,
    *,
    n_passkeys: int = 5,
    n_words: int = 8,
    seed: int = 0,
    haystack: Haystack | None = None,
) -> PasskeyPrompt:
    """Hide passkeys of random words in a document, and recall all of them after it.

    Source: the synthetic data of DuoAttention, arXiv:2410.10819, section 2.3 (there ten
    passkeys of 32 tokens each, in much longer text).

    Args:
        count_tokens: number of tokens of a text.
        n_tokens: tokens of the whole text, recall included, at most; it falls short by less than a
            sentence.
        n_passkeys: how many.
        n_words: words per passkey.
        seed: draws the words, the places and the haystack's order.
        haystack: text around them; None is `library_prose()`.

    Raises:
        ConfigError: a count is out of range, or the text is too short for the passkeys.
    """
    count = checked_count("n_passkeys", n_passkeys, 1)
    words = checked_count("n_words", n_words, 1)
    draw = random.Random(f"kvkeep passkeys {seed}")
    passkeys = [" ".join(draw.choices(WORDS, k=words)) for _ in range(count)]
    inserts = [
        (f"Remember the {_ordinal(index)} passkey: {passkey}.", depth)
        for index, (passkey, depth) in enumerate(
            zip(passkeys, sorted(spread_depths(count, seed)), strict=True)
        )
    ]
    recall, recall_spans = "\n\nThe passkeys of the text were:", []
    for index, passkey in enumerate(passkeys):
        recall += f"\nThe {_ordinal(index)} passkey: "
        recall_spans.append((len(recall), len(recall) + len(passkey)))
        recall += f"{passkey}."
    document, hidden = filled(
        count_tokens,
        max(checked_count("n_tokens", n_tokens, 1) - count_tokens(recall), 1),
        library_prose() if haystack is None else haystack,
        inserts,
        seed=seed,
        avoid=("passkey",),
    )
    spans = [
        (place.stop - 1 - len(key), place.stop - 1)
        for place, key in zip(hidden, passkeys, strict=True)
    ]
    return PasskeyPrompt(
        text=document + recall,
        passkeys=tuple(passkeys),
        context_spans=tuple(spans),
        recall_spans=tuple((len(document) + a, len(document) + b) for a, b in recall_spans),
        recall_start=len(document),
        seed=seed,
    )


def _ordinal(index: int) -> str:
    return _ORDINALS[index] if index < len(_ORDINALS) else f"{index + 1}th"
