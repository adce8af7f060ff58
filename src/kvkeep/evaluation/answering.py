"""Questions asked over a prefilled cache, one after another, answered greedily."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvkeep.evaluation.rendering import Tokens
from kvkeep.generation import stream_generate
from kvkeep.suite import copy_cache


def answers(
    model: Any,
    tokenizer: Any,
    cache: list[Any],
    tokens: Tokens,
    *,
    held: int,
    max_tokens: int,
    step: int = 2048,
) -> tuple[str, ...]:
    """Greedy answers to an example's turns, over one cache without compacting it again.

    Each turn is read onto the cache; its answer is decoded on a copy, as the next turn follows
    the right answer instead (see `render`).

    Args:
        cache: holds the first `held` tokens, of which rows may be gone; appended to.
        tokens: of the example.
        held: at most the first turn's end.
        max_tokens: of an answer.
        step: tokens per chunk.
    """
    found = []
    for number, (prompt, end) in enumerate(zip(tokens.prompts, tokens.ends, strict=True)):
        feed(model, cache, prompt[held:end], step)
        last = number + 1 == len(tokens.prompts)
        own = cache if last else copy_cache(cache)
        found.append(decoded(model, tokenizer, own, prompt[end:], max_tokens, step))
        held = end
    return tuple(found)


def decoded(
    model: Any,
    tokenizer: Any,
    cache: list[Any],
    tokens: Sequence[int],
    max_tokens: int,
    step: int = 2048,
) -> str:
    """Text that greedy decoding goes on with after `tokens` (at least 1), on `cache`."""
    responses = stream_generate(
        model,
        tokenizer,
        list(tokens),
        config=None,
        prompt_cache=cache,
        max_tokens=max_tokens,
        prefill_step_size=step,
    )
    return "".join(response.text for response in responses)


def feed(model: Any, cache: list[Any], tokens: Sequence[int], step: int = 2048) -> None:
    """Append tokens to a cache, chunk by chunk; none does nothing."""
    for start in range(0, len(tokens), step):
        model(mx.array(list(tokens[start : start + step]))[None], cache=cache)
        mx.eval([layer.state for layer in cache])
