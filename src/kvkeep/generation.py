"""Generate over a compact cache: prefill, compact, then mlx-lm's own stepping."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import GenerationResponse as MlxGenerationResponse
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from kvkeep.allocation import allocation_of
from kvkeep.attention import DraftStart, ProgressCallback, RepeatPrompt
from kvkeep.compaction import checked_prompt, prefill_and_compact
from kvkeep.errors import ConfigError
from kvkeep.policies import policy_of
from kvkeep.spec import Budget, EvictionConfig, SnapKVEvictionResult

# The instructions of KVzip's authors.
_REPEAT = "\n\nRepeat the previous context exactly."
_GO_ON = "\n\nRepeat the part of the previous context exactly, starting with "

#: What the commands do unless told otherwise.
RECOMMENDED = EvictionConfig(policy="lookahead", budget=Budget(0.25, "share"))
#: What the server does when a request names no policy: drafting would hold up all the others.
SERVED = EvictionConfig(policy="span", budget=Budget(0.25, "share"))


@dataclass
class GenerationResponse(MlxGenerationResponse):
    """mlx-lm's response; `kv` says what became of the prompt's cache.

    `prompt_tokens` counts the whole prompt and `prompt_tps` its prefill, as in mlx-lm.

    Attributes:
        kv: the compaction's figures (without the cache), or None where eviction is off.
    """

    kv: SnapKVEvictionResult | None = None


def stream_generate(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    *,
    config: EvictionConfig | None = RECOMMENDED,
    max_tokens: int = 256,
    draft_model: Any = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = 2048,
    prompt_progress_callback: ProgressCallback | None = None,
    on_prefilled: Callable[[list[Any]], None] | None = None,
    **kwargs: Any,
) -> Generator[GenerationResponse, None, None]:
    """Like `mlx_lm.stream_generate`, over a cache compacted after the prefill.

    All but the prompt's last token are prefilled and compacted; mlx-lm then steps from
    the last token, so sampling, processors, stopping and speculation are its own.

    Args:
        prompt: text or T token ids.
        config: what to evict; None runs exact.
        draft_model: for speculative decoding; its own cache stays exact.
        prompt_cache: caches to continue (exact or compact); updated in place. With a draft
            model, its caches may follow the model's, as in mlx-lm.
        on_prefilled: called once with the layers as they were before they were compacted, the
            draft model's after them: T - 1 positions. They are the callee's to keep; the
            whole exact cache lives as long as they do.
        kwargs: as in mlx-lm's `generate_step`.

    Raises:
        PromptError, ConfigError, UnsupportedModelError: before any token is generated.
    """
    if max_tokens == 0:  # mlx-lm would say so only after the prompt was read
        raise ConfigError("no tokens to generate", expected="max_tokens >= 1, or -1", received=0)
    if config is not None:
        refuse_unevictable(config, kwargs)
    wrapped = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    tokens = checked_prompt(encode_prompt(wrapped, prompt))
    step: dict[str, Any] = {"prefill_step_size": prefill_step_size, "max_tokens": max_tokens}
    if config is None:
        if prompt_cache is not None:
            step["prompt_cache"] = prompt_cache
        step["prompt_progress_callback"] = prompt_progress_callback
        for response in mlx_lm.stream_generate(
            model, wrapped, mx.array(tokens), draft_model=draft_model, **step, **kwargs
        ):
            yield GenerationResponse(**vars(response))
        return
    cache = make_prompt_cache(model) if prompt_cache is None else prompt_cache
    repeat = repeat_prompt(wrapped, config)
    draft = draft_start(wrapped, config, tokens[-1])
    with mx.stream(kwargs.get("stream", generation_stream)):  # the one mlx-lm decodes on
        ready = _prepare(
            model,
            draft_model,
            tokens,
            cache,
            config,
            prefill_step_size,
            prompt_progress_callback,
            repeat,
            draft,
            on_prefilled,
        )
    if processors := kwargs.get("logits_processors"):
        kwargs["logits_processors"] = [with_prefix(tokens[:-1], p) for p in processors]
    # mlx-lm replaces entries of the list it gets (quantisation): the caller's must follow.
    for response in mlx_lm.stream_generate(
        model,
        wrapped,
        mx.array(tokens[-1:]),
        draft_model=draft_model,
        prompt_cache=ready.cache,
        **step,
        **kwargs,
    ):
        yield GenerationResponse(
            **{
                **vars(response),
                "prompt_tokens": len(tokens),
                "prompt_tps": len(tokens) / max(ready.seconds, 1e-9),
                "kv": ready.kv,
            }
        )


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    *,
    config: EvictionConfig | None = RECOMMENDED,
    verbose: bool = False,
    **kwargs: Any,
) -> str:
    """The whole answer of `stream_generate`; with `verbose` it is printed as it comes."""
    text = ""
    for response in stream_generate(model, tokenizer, prompt, config=config, **kwargs):
        if verbose:
            print(response.text, end="", flush=True)
        text += response.text
    if verbose:
        print()
    return text


def refuse_unevictable(config: EvictionConfig, options: Mapping[str, Any]) -> None:
    """Refuse options of mlx-lm's `generate_step` that eviction cannot be combined with.

    Raises:
        ConfigError: `max_kv_size` or `input_embeddings` is set, or `kv_bits` with heads that
            keep unequal rows.
    """
    uneven = config.store in ("ragged", "union") or allocation_of(config).by_head
    if options.get("kv_bits") is not None and uneven:
        raise ConfigError(
            "heads that keep unequal rows cannot be quantised",
            expected="store 'shared' or 'per-head' with kv_bits, or no kv_bits",
            received=f"store {config.store!r}, allocation {config.allocation!r}",
        )
    if options.get("max_kv_size") is not None:
        raise ConfigError(
            "max_kv_size and eviction exclude each other",
            expected="one of them",
            received=f"max_kv_size={options['max_kv_size']} and a {config.policy!r} config",
            remedy="Use the budget (--kv-budget), or switch eviction off.",
        )
    if options.get("input_embeddings") is not None:
        raise ConfigError(
            "eviction does not take input embeddings", expected="token ids", received="embeddings"
        )


def repeat_prompt(tokenizer: TokenizerWrapper, config: EvictionConfig) -> RepeatPrompt | None:
    """Instructions for policies that read the prompt a second time; None for the others."""
    if "replay" not in policy_of(config).needs:
        return None
    first, later = (
        tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (_REPEAT, _GO_ON)
    )
    return RepeatPrompt(first, later)


def draft_start(
    tokenizer: TokenizerWrapper, config: EvictionConfig, token: int | None
) -> DraftStart | None:
    """Where policies that draft an answer begin; None for the others.

    Args:
        token: the one that follows what is compacted, where it is known.
    """
    if not policy_of(config).draft_length:
        return None
    return DraftStart(token, frozenset(tokenizer.eos_token_ids))


def encode_prompt(tokenizer: TokenizerWrapper, prompt: str | Sequence[int] | mx.array) -> Any:
    """Token ids of a prompt, special tokens added where mlx-lm adds them."""
    if not isinstance(prompt, str):
        return prompt
    special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
    return tokenizer.encode(prompt, add_special_tokens=special)


@dataclass(frozen=True)
class _Ready:
    cache: list[Any]
    kv: SnapKVEvictionResult | None
    seconds: float


def _prepare(
    model: Any,
    draft_model: Any,
    tokens: list[int],
    cache: list[Any],
    config: EvictionConfig,
    step: int,
    progress: ProgressCallback | None,
    repeat: RepeatPrompt | None,
    draft: DraftStart | None,
    on_prefilled: Callable[[list[Any]], None] | None,
) -> _Ready:
    """Prefill and compact all but the last token, on the current stream."""
    start = time.perf_counter()
    kv, exact = None, []
    drafts = [] if draft_model is None else cache[len(model.layers) :]
    del cache[len(cache) - len(drafts) :]
    with wired_limit(model):  # mlx-lm raises it only for what it runs itself
        try:
            if len(tokens) > 1:
                done = prefill_and_compact(
                    model,
                    tokens[:-1],
                    cache,
                    config,
                    step=step,
                    progress=progress,
                    keep_exact=on_prefilled is not None,
                    repeat_prompt=repeat,
                    draft_start=draft,
                )
                if on_prefilled is not None:
                    exact, cache[:] = list(cache), done.cache
                kv = replace(done, cache=[])
        finally:
            cache += drafts
        if draft_model is None:
            if on_prefilled is not None and exact:
                on_prefilled(exact)
            return _Ready(cache, kv, time.perf_counter() - start)
        both = cache if drafts else cache + make_prompt_cache(draft_model)
        drafts = both[len(model.layers) :]
        for first in range(0, len(tokens) - 1, step):
            chunk = mx.array(tokens[first : min(first + step, len(tokens) - 1)])
            draft_model(chunk[None], cache=drafts)
            mx.eval([c.state for c in drafts])
        if on_prefilled is not None and exact:
            on_prefilled(exact + copy.deepcopy(drafts))
    return _Ready(both, kv, time.perf_counter() - start)


def with_prefix(tokens: list[int], processor: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A logits processor that sees the prompt, though mlx-lm steps from its last token."""
    prefix = mx.array(tokens, mx.int32)

    def process(context: mx.array, logits: mx.array) -> mx.array:
        whole = mx.concatenate([prefix.astype(context.dtype), context])
        return processor(whole, logits)

    return process
