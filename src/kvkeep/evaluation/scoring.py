"""How much of a right answer a text holds: string matches after normalising both."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kvkeep.spec import named

#: (share of the answers found) -> score.
Rule = Callable[[Sequence[bool]], float]

#: Scoring rules by name: all answers or nothing, the share that is there, or any of them.
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "all": lambda found: float(all(found)),
        "fraction": lambda found: sum(found) / len(found),
        "any": lambda found: float(any(found)),
    }
)


def score(text: str, answers: Sequence[str], rule: str) -> float:
    """Score in [0, 1] of an answer.

    RULER (arXiv:2404.06654, its `string_match_all` and `string_match_part`) looks for plain
    substrings; here an answer must also stand by itself, so that 481 is not found in 4815.

    Args:
        text: what the model wrote.
        answers: at least one string to find.
        rule: a name in `RULES`.

    Raises:
        ConfigError: there is no such rule.
    """
    judged = named("scoring rule", rule, RULES)
    return judged([holds(text, answer) for answer in answers])


def holds(text: str, answer: str) -> bool:
    """Whether a text says an answer, as a word or words of its own."""
    pattern = rf"(?<!\w){re.escape(normalised(answer))}(?!\w)"
    return re.search(pattern, normalised(text)) is not None


def normalised(text: str) -> str:
    """Case, widths of characters and white space made equal."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
