"""Documents of a given length in tokens with sentences put in at given depths."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkeep.errors import ConfigError
from kvkeep.haystack.text import Haystack
from kvkeep.spec import checked_count

#: Text -> its number of tokens, such as `lambda text: len(tokenizer.encode(text))`.
CountTokens = Callable[[str], int]

_LONGEST = 600  # characters: longer sentences would make the length and the depth coarse


@dataclass(frozen=True)
class Hidden:
    """A sentence that was put into a document.

    Attributes:
        sentence: what was put in.
        start, stop: its characters, document[start:stop].
        depth: share of the document's characters in front of it, in [0, 1].
    """

    sentence: str
    start: int
    stop: int
    depth: float


def filled(
    count_tokens: CountTokens,
    n_tokens: int,
    haystack: Haystack,
    inserts: Sequence[tuple[str, float]],
    *,
    seed: int,
    avoid: Sequence[str] = (),
) -> tuple[str, tuple[Hidden, ...]]:
    """A document of at most `n_tokens` tokens, less by no more than one sentence.

    Args:
        count_tokens: of a text.
        haystack: whose sentences surround the inserts.
        inserts: (sentence, depth in [0, 1]); each goes between two sentences, close to its
            depth. Equal places keep the order given.
        seed: of the haystack's order.
        avoid: words (in any case) that no sentence of the haystack may have.

    Returns:
        The document, and where each insert went, in the order given.

    Raises:
        ConfigError: `n_tokens` has no room for the inserts and a sentence beside each, a depth is
            outside [0, 1], or the haystack has no sentence without the words to avoid.
    """
    limit = checked_count("n_tokens", n_tokens, 1)
    for sentence, depth in inserts:
        if not 0 <= depth <= 1:
            raise ConfigError(
                f"bad depth for {sentence!r}", expected="a number from 0 to 1", received=f"{depth}"
            )
    words = [word.casefold() for word in avoid]
    pieces: list[tuple[str, bool]] = []
    stream, skipped = haystack.sentences(seed), 0
    used = sum(count_tokens(f" {sentence}") for sentence, _ in inserts)
    while used <= limit:
        sentence, begins = next(stream)
        plain = sentence.casefold()
        if len(sentence) > _LONGEST or any(word in plain for word in words):
            skipped += 1
            if skipped > 10_000 and not pieces:
                raise ConfigError(
                    f"haystack {haystack.name!r} has no sentence without {', '.join(avoid)}",
                    expected="sentences that do not have the needle's words",
                )
            continue
        pieces.append((sentence, begins))
        used += count_tokens(f" {sentence}")
    while len(pieces) > len(inserts):
        document, hidden = _joined(pieces, inserts)
        if count_tokens(document) <= limit:
            return document, hidden
        pieces.pop()
    raise ConfigError(
        f"{limit} tokens are too few for {len(inserts)} needles",
        expected="room for the needles and more sentences than needles",
        received=f"{limit} tokens",
        remedy="Ask for a longer document or for fewer needles.",
    )


def spread_depths(count: int, seed: int) -> list[float]:
    """`count` depths in (0, 1), one in each `count`-th of it, in an order drawn by `seed`.

    Raises:
        ConfigError: `count` is no whole number >= 1.
    """
    parts = checked_count("count", count, 1)
    draw = random.Random(f"kvkeep depths {seed}")
    depths = [(index + draw.uniform(0.25, 0.75)) / parts for index in range(parts)]
    draw.shuffle(depths)
    return depths


def _joined(
    pieces: Sequence[tuple[str, bool]], inserts: Sequence[tuple[str, float]]
) -> tuple[str, tuple[Hidden, ...]]:
    """Sentences and inserts as one text, and where the inserts are."""
    starts, total = [], 0
    for sentence, _ in pieces:
        starts.append(total)
        total += len(sentence) + 1
    starts.append(total)
    # At most one insert between two sentences where that is possible, so that none are neighbours.
    places: dict[int, list[int]] = {}
    for index in sorted(range(len(inserts)), key=lambda i: (inserts[i][1], i)):
        aim = inserts[index][1] * total
        by_distance = sorted(range(len(starts)), key=lambda at: (abs(starts[at] - aim), at))
        place = next(at for at in by_distance if at not in places)
        places.setdefault(place, []).append(index)
    text, spans = "", [(0, 0)] * len(inserts)
    for place in range(len(starts)):
        for index in places.get(place, ()):
            text += " " if text else ""
            spans[index] = (len(text), len(text) + len(inserts[index][0]))
            text += inserts[index][0]
        if place < len(pieces):
            sentence, begins = pieces[place]
            text += ("\n\n" if begins else " ") if text else ""
            text += sentence
    return text, tuple(
        Hidden(inserts[index][0], start, stop, start / max(len(text), 1))
        for index, (start, stop) in enumerate(spans)
    )
