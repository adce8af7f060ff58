"""Everything that a policy wants to see of a prompt: its prefill, a second reading, a draft."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvkeep.attention.draft import DraftStart, drafted
from kvkeep.attention.prefill import Observation, ProgressCallback, observed_prefill
from kvkeep.attention.repeat import RepeatPrompt, repeated
from kvkeep.policies import Policy


def observed_reading(
    model: Any,
    tokens: Sequence[int],
    cache: list[Any],
    layers: list[int],
    policy: Policy,
    *,
    window: int,
    repeat_prompt: RepeatPrompt | None = None,
    draft_start: DraftStart | None = None,
    score_chunk_size: int = 8,
    step: int = 2048,
    progress: ProgressCallback | None = None,
) -> tuple[Observation, float]:
    """Prefill under observation; read the prompt again, or draft, where the policy asks for that.

    Args:
        layers: cache indices to observe; none where nothing will be evicted.
        window: W, last queries to keep.
        repeat_prompt: instructions of the second reading; None: the prompt's tokens alone.
        draft_start: where a policy's draft of the answer begins; None: where the prompt ends.
        score_chunk_size, step, progress: as in `observed_prefill`.

    Returns:
        What was seen, and the seconds that the prefill alone took.

    Raises:
        UnsupportedModelError: as `observed_prefill`.
    """
    start = time.perf_counter()
    seen = observed_prefill(
        model,
        tokens,
        cache,
        layers,
        window=window,
        policy=policy.name,
        scorer=policy,
        allow_capture=policy.scope == "model",
        score_chunk_size=score_chunk_size,
        step=step,
        progress=progress,
    )
    prefill = time.perf_counter() - start
    if "replay" in policy.needs and layers:
        prompt = repeat_prompt or RepeatPrompt()
        seen = repeated(model, tokens, cache, layers, policy, seen, prompt, step)
    if policy.draft_length and layers:
        start_at = draft_start or DraftStart()
        seen = drafted(model, tokens, cache, layers, policy, seen, start_at)
    return seen, prefill
