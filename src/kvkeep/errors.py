"""Project errors: each says what was expected, what came and what to do."""

from __future__ import annotations


class KvkeepError(Exception):
    """Base of every error that kvkeep raises for a user's fault.

    Args:
        problem: one sentence that names what is wrong.
        expected: what would have been accepted.
        received: what came; shown by `repr` unless it is a string.
        remedy: what to do about it.
    """

    def __init__(
        self,
        problem: str,
        *,
        expected: str | None = None,
        received: object = None,
        remedy: str | None = None,
    ) -> None:
        self.problem = problem
        self.expected = expected
        self.received = received
        self.remedy = remedy
        parts = [problem.rstrip(".")]
        if expected is not None:
            parts.append(f"expected {expected}")
        if received is not None:
            parts.append(f"got {received if isinstance(received, str) else repr(received)}")
        text = "; ".join(parts) + "."
        super().__init__(f"{text} {remedy}" if remedy else text)


class ConfigError(KvkeepError, ValueError):
    """A setting (keyword, flag or request field) is unknown or out of range."""


class BudgetError(ConfigError):
    """A budget is below 1 row, unreadable, or below what is protected."""


class SelectionError(KvkeepError, ValueError):
    """Scores or indices do not describe a set of rows of this cache."""


class PromptError(KvkeepError, ValueError):
    """The prompt is empty or not a flat sequence of token ids."""


class CacheError(KvkeepError, ValueError):
    """A cache is of the wrong kind, batch size or state for the operation."""


class TrimError(CacheError):
    """A trim asks for a negative number of tokens or for more than there are."""


class CacheFileError(KvkeepError):
    """A saved prompt cache is missing, truncated, foreign or of another model."""


class UnsupportedModelError(KvkeepError):
    """The model's attention or cache cannot be evicted exactly: refused by name."""


class HeadProfileError(KvkeepError, ValueError):
    """A head profile is missing, damaged, or of another model or configuration."""


class OutputError(KvkeepError):
    """A page, picture or table cannot be written where it was asked for."""


class BenchFileError(KvkeepError, ValueError):
    """A file of benchmark results is missing, damaged, or of another device or model."""


class DemoModelError(KvkeepError):
    """The demo model could not be fetched, verified or converted."""


class EvaluationError(KvkeepError):
    """A file of evaluation results is foreign or damaged, or cannot be written."""
