"""Samples of random tokens with passkeys at known places, and settings that run in milliseconds."""

from __future__ import annotations

from typing import Any

from kvkeep.heads import ProfileSettings, Recall, Sample
from tiny_models import random_tokens

LENGTH, START = 56, 40


def random_sample(index: int) -> Sample:
    """Two passkeys of three tokens, recalled at the end of 56."""
    tokens = random_tokens(LENGTH, seed=100 + index)
    recalls = (Recall((10, 13), (44, 47)), Recall((20, 23), (51, 54)))
    for recall in recalls:
        tokens[slice(*recall.answer)] = tokens[slice(*recall.needle)]
    return Sample(tuple(tokens), START, recalls)


def tiny_settings(**options: Any) -> ProfileSettings:
    return ProfileSettings(
        **{"sinks": 2, "recent": 5, "steps": 6, "texts": 0, "lr": 0.1, **options}
    )
