"""One prefill, two answers: over the exact cache and over the compact one."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from kvkeep.attention import ProgressCallback
from kvkeep.caches import CompactCache, allocated_nbytes
from kvkeep.compaction import cache_nbytes, checked_prompt, prefill_and_compact
from kvkeep.errors import CacheError, ConfigError, PromptError
from kvkeep.generation import (
    RECOMMENDED,
    draft_start,
    encode_prompt,
    refuse_unevictable,
    repeat_prompt,
    stream_generate,
    with_prefix,
)
from kvkeep.spec import EvictionConfig, SnapKVEvictionResult

#: What tells its live rows and its buffers apart.


@dataclass(frozen=True)
class Answer:
    """What one cache answered, and what it cost.

    Attributes:
        text: the answer.
        tokens: its token ids, an end token included.
        finish_reason: "stop" or "length".
        rows: rows per KV head of the prompt that the answer could read.
        live_nbytes: bytes of those rows in all layers, measured before the first step.
        allocated_nbytes: bytes of the buffers at the end of the answer, as quantised by
            `kv_bits` where that was asked for.
        decode_seconds: from the first token to the last.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None
    rows: int
    live_nbytes: int
    allocated_nbytes: int
    decode_seconds: float

    @property
    def decode_tps(self) -> float | None:
        """Tokens per second after the first one; None where there was only one."""
        steps = len(self.tokens) - 1
        return steps / max(self.decode_seconds, 1e-9) if steps > 0 else None


@dataclass(frozen=True)
class Comparison:
    """Two answers to one prompt.

    Attributes:
        exact: over all rows.
        evicted: over the rows that the config keeps.
        prompt_tokens: T.
        kv: the compaction's figures, without the cache.
        peak_memory: bytes, over both (they hold both caches).
    """

    exact: Answer
    evicted: Answer
    prompt_tokens: int
    kv: SnapKVEvictionResult
    peak_memory: int


def compare(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    *,
    config: EvictionConfig = RECOMMENDED,
    seed: int = 0,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = 2048,
    prompt_progress_callback: ProgressCallback | None = None,
    on_answer: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Comparison:
    """Answer a prompt over the exact and over the evicted cache of one prefill.

    Both step from the prompt's last token with the same options, and the random state is
    seeded anew before each.

    Args:
        prompt: text or T >= 2 token ids.
        seed: what both answers are drawn with.
        prompt_cache: exact caches to continue; they end as the exact answer leaves them.
        on_answer: called with "exact" and "evicted" as each answer begins.
        kwargs: `max_tokens` and the options of mlx-lm's `generate_step`.

    Raises:
        PromptError: fewer than 2 tokens.
        CacheError: `prompt_cache` is compact, so there is no exact side.
        ConfigError, UnsupportedModelError: as in `stream_generate`.
    """
    refuse_unevictable(config, kwargs)
    if kwargs.get("draft_model") is not None:
        raise ConfigError(
            "a comparison does not speculate", expected="no draft model", received="draft_model"
        )
    wrapped = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    tokens = checked_prompt(encode_prompt(wrapped, prompt))
    if len(tokens) < 2:
        raise PromptError("nothing to evict", expected="at least 2 tokens", received="1 token")
    cache = make_prompt_cache(model) if prompt_cache is None else prompt_cache
    if any(isinstance(layer, CompactCache) for layer in cache):
        raise CacheError(
            "a compact prompt cache has no exact side to compare with",
            expected="an exact prompt cache",
            received="compact layers",
        )
    stream = kwargs.get("stream", generation_stream)
    with wired_limit(model, [stream]), mx.stream(stream):
        done = prefill_and_compact(
            model,
            tokens[:-1],
            cache,
            config,
            step=prefill_step_size,
            progress=prompt_progress_callback,
            keep_exact=True,
            repeat_prompt=repeat_prompt(wrapped, config),
            draft_start=draft_start(wrapped, config, tokens[-1]),
        )
    # Layers that were not evicted are the exact cache's own: each side steps its own copy.
    kept = [
        copy.deepcopy(layer) if layer is own else layer
        for layer, own in zip(done.cache, cache, strict=True)
    ]
    if processors := kwargs.get("logits_processors"):
        kwargs["logits_processors"] = [with_prefix(tokens[:-1], p) for p in processors]
    answers = []
    for name, rows, layers in (
        ("exact", done.original_tokens, cache),
        ("evicted", done.retained_tokens, kept),
    ):
        if on_answer is not None:
            on_answer(name)
        mx.random.seed(seed)
        answers.append(_answer(model, wrapped, tokens[-1:], layers, rows, kwargs))
    return Comparison(
        exact=answers[0],
        evicted=answers[1],
        prompt_tokens=len(tokens),
        kv=replace(done, cache=[]),
        peak_memory=mx.get_peak_memory(),
    )


def _answer(
    model: Any,
    tokenizer: TokenizerWrapper,
    last: list[int],
    cache: list[Any],
    rows: int,
    options: dict[str, Any],
) -> Answer:
    """Step from the prompt's last token over a prefilled cache."""
    live = cache_nbytes(cache)
    text, tokens, reason = "", [], None
    first = latest = 0.0
    for response in stream_generate(
        model, tokenizer, last, config=None, prompt_cache=cache, **options
    ):
        latest = time.perf_counter()
        first = first or latest
        text += response.text
        tokens.append(response.token)
        reason = response.finish_reason
    return Answer(
        text=text,
        tokens=tuple(tokens),
        finish_reason=reason,
        rows=rows,
        live_nbytes=live,
        allocated_nbytes=allocated_nbytes(cache),
        decode_seconds=latest - first,
    )
