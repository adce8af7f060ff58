"""Counting: the most common words of a list, the most frequent made-up words of a text."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from kvkeep.errors import ConfigError
from kvkeep.evaluation.examples import Turn
from kvkeep.evaluation.tasks.base import Draft, Parts, Task
from kvkeep.haystack import CountTokens
from kvkeep.haystack.values import WORDS

_RULER = "RULER (arXiv:2404.06654), section 3.3"
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


def common_words(common: int, times: int, others_times: int) -> Task:
    """A list of words, some of which stand in it more often than all the others."""

    def make(draft: Draft) -> Parts:
        draw = random.Random(f"kvkeep common words {draft.seed}")
        top, rest = _split(draw, common)

        def text_of(others: int) -> str:
            words = [*top * times, *_more(rest, others) * others_times]
            random.Random(f"kvkeep order {draft.seed}").shuffle(words)
            return " ".join(f"{at}. {word}" for at, word in enumerate(words, 1))

        document, others = _longest(draft.count_tokens, draft.n_tokens, text_of, least=common)
        turn = _listing(
            top,
            f"What are the {common} most common words in the list above?",
            f"The {common} most common words in the list are",
        )
        return Parts(document, (turn,), details={"times": times, "others": others})

    return Task(
        name="common-words",
        version=1,
        summary=f"the {common} words that stand {times} times in a list, others {others_times}",
        source=f"{_RULER}: common words extraction",
        scoring="fraction",
        max_tokens=48,
        make=make,
    )


def frequent_words(asked: int, alpha: float) -> Task:
    """A text of made-up words whose frequencies fall as rank ** -alpha."""

    def make(draft: Draft) -> Parts:
        draw = random.Random(f"kvkeep frequent words {draft.seed}")
        words = _made_up(draw, 60)
        weights = [rank**-alpha for rank in range(1, len(words) + 1)]

        def text_of(count: int) -> str:
            counts = Counter(dict(zip(words, _shares(count, weights), strict=True)))
            drawn = list(counts.elements())
            random.Random(f"kvkeep order {draft.seed}").shuffle(drawn)
            return " ".join(drawn)

        document, count = _longest(draft.count_tokens, draft.n_tokens, text_of, least=16 * asked)
        turn = _listing(
            words[:asked],
            f"What are the {asked} code words that appear most often in the text above?",
            f"The {asked} code words that appear most often are",
        )
        return Parts(document, (turn,), details={"words": count, "alpha": alpha})

    return Task(
        name="frequent-words",
        version=1,
        summary=f"the {asked} made-up words that appear most often",
        source=f"{_RULER}: frequent words extraction",
        scoring="fraction",
        max_tokens=40,
        make=make,
    )


def _listing(words: Sequence[str], question: str, answer_prefix: str) -> Turn:
    return Turn(
        question=question,
        answers=tuple(words),
        answer_prefix=answer_prefix,
        gold=f" {', '.join(words[:-1])} and {words[-1]}.",
    )


def _split(draw: random.Random, common: int) -> tuple[list[str], list[str]]:
    words: list[str] = draw.sample(list[str](WORDS), len(WORDS))
    return words[:common], words[common:]


def _more(words: Sequence[str], count: int) -> list[str]:
    """`count` different words: single ones, then pairs of them."""
    found = list(words[:count])
    for step in range(1, len(words)):
        for at, word in enumerate(words):
            if len(found) >= count:
                return found
            found.append(f"{word}-{words[(at + step) % len(words)]}")
    if len(found) < count:
        raise ConfigError(
            "the list of words is too long",
            expected=f"at most {len(found)} different words",
            received=f"{count}",
            remedy="Ask for a shorter prompt.",
        )
    return found


def _made_up(draw: random.Random, count: int) -> list[str]:
    """Different words of three syllables, none of which is part of another."""
    words: list[str] = []
    while len(words) < count:
        word = "".join(draw.choice(_CONSONANTS) + draw.choice(_VOWELS) for _ in range(3))
        if word not in words:
            words.append(word)
    return words


def _shares(count: int, weights: Sequence[float]) -> list[int]:
    """`count` in proportion to falling weights, the first ones strictly falling."""
    total = sum(weights)
    shares = [int(count * weight / total) for weight in weights]
    shares[0] += count - sum(shares)
    return shares


def _longest(
    count_tokens: CountTokens, n_tokens: int, text_of: Callable[[int], str], *, least: int
) -> tuple[str, int]:
    """The longest text of at most `n_tokens` tokens, and the size that gave it.

    Raises:
        ConfigError: even `least` is too long.
    """
    if count_tokens(text_of(least)) > n_tokens:
        raise ConfigError(
            f"{n_tokens} tokens are too few for a list of words",
            expected=f"at least {count_tokens(text_of(least))} tokens",
            received=f"{n_tokens}",
            remedy="Ask for a longer prompt.",
        )
    low, high = least, 2 * least
    while count_tokens(text_of(high)) <= n_tokens:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if count_tokens(text_of(middle)) <= n_tokens:
            low = middle
        else:
            high = middle
    return text_of(low), low
