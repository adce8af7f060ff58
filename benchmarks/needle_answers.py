"""One prompt read once; every setting answers over a copy of its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from kvkeep import EvictionConfig, copy_cache, evict_selection
from kvkeep.allocation import allocation_of
from kvkeep.attention import (
    DraftStart,
    Observation,
    RepeatPrompt,
    drafted,
    observed_prefill,
    repeated,
)
from kvkeep.compaction import choose_observed
from kvkeep.evictable import evictable_layers
from kvkeep.haystack import NeedlePrompt
from kvkeep.policies import Policy, policy_of
from kvkeep.spec import LayerView

_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"  # in no document: where the question begins
_BY_BUDGET = ("criticalkv", "compactor")  # their scores depend on how many rows stay


@dataclass(frozen=True)
class Asked:
    """A prompt as token ids.

    Attributes:
        context: [T], what is prefilled and evicted from.
        given: tokens that follow on the evicted cache before the answer, at least 1.
        answer: tokens of the right answer, greedy or wrong.
    """

    context: list[int]
    given: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Read:
    """A prefilled prompt.

    Attributes:
        cache: exact; stays as it is.
        layers: indices of its evictable layers.
        seen: the last queries, as many as the widest window.
        scores: what policies scored so far, by policy, layer and (where it matters) budget.
    """

    cache: list[Any]
    layers: list[int]
    seen: Observation
    scores: dict[tuple[Policy, int, int | None], mx.array] = field(default_factory=dict)


class Remembered:
    """A policy that scores a prompt's layer once, however many budgets ask for it."""

    def __init__(self, policy: Policy, scores: dict[tuple[Policy, int, int | None], mx.array]):
        self._policy, self._scores = policy, scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def score(self, view: LayerView) -> mx.array:
        """As the policy does."""
        key = (self._policy, view.layer, view.keep if self._policy.name in _BY_BUDGET else None)
        if key not in self._scores:
            self._scores[key] = self._policy.score(view)
        return self._scores[key]


def asked(tokenizer: Any, prompt: NeedlePrompt, *, question: str = "inside") -> Asked:
    """A prompt in the chat template.

    Args:
        tokenizer: with a chat template.
        prompt: the needle.
        question: "inside" (the whole prompt but its last token is prefilled and evicted: what
            generation does) or "after" (only what stands before the question is).
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    gap = "\n\n"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{prompt.document}{_MARK}{gap}{prompt.question}"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    before, after = chat.split(_MARK)
    whole = before + after
    # The tokens are those of the text with its answer, as a model would go on writing it.
    with_answer = encode(whole + prompt.answered)
    answer = _same_start(with_answer, encode(whole + prompt.answer_prefix))
    if question == "inside":
        start = _same_start(with_answer, encode(whole)) - 1
    else:
        start = _same_start(with_answer, encode(before))
    return Asked(with_answer[:start], with_answer[start:answer], with_answer[answer:])


def read(
    model: Any,
    context: Sequence[int],
    window: int,
    step: int = 512,
    policy: Policy | None = None,
    repeat: RepeatPrompt | None = None,
    draft: DraftStart | None = None,
) -> Read:
    """Prefill a prompt once, keeping the last `window` queries of each layer.

    Args:
        policy: one that looks at more than that while the prompt is read (`own_reading`).
        repeat: its instructions to repeat the prompt, if it takes any.
        draft: where its draft of the answer begins, if it drafts.
    """
    cache = make_prompt_cache(model)
    layers = evictable_layers(model, cache)
    name = "span" if policy is None else policy.name
    seen = observed_prefill(
        model, context, cache, layers, window=window, policy=name, scorer=policy, step=step
    )
    if policy is not None and "replay" in policy.needs:
        prompt = repeat or RepeatPrompt()
        seen = repeated(model, context, cache, layers, policy, seen, prompt, step)
    if policy is not None and policy.draft_length:
        seen = drafted(model, context, cache, layers, policy, seen, draft or DraftStart())
    return Read(cache, layers, seen)


def own_reading(config: EvictionConfig) -> Policy | None:
    """A config's policy if it must see the whole prompt being read, else None."""
    policy = policy_of(config)
    return policy if policy.needs - {"queries", "keys", "values"} else None


def evicted(prompt: Read, config: EvictionConfig) -> list[Any]:
    """A compact copy of a prompt's cache, chosen as `compact_prompt_cache` would."""
    policy, allocation = policy_of(config), allocation_of(config)
    once = cast(Policy, Remembered(policy, prompt.scores))
    chosen = choose_observed(prompt.cache, prompt.layers, prompt.seen, config, once, allocation)
    if not chosen.layers:
        return copy_cache(prompt.cache)
    return evict_selection(prompt.cache, chosen, config.store).cache


def answers(model: Any, cache: list[Any], prompt: Asked) -> bool:
    """Whether greedy decoding gives exactly the answer; appends to `cache`.

    One forward over the answer itself: as long as each token is the most likely one after the
    right ones before it, greedy decoding takes it; after the first other one it is wrong.
    """
    tokens = [*prompt.given, *prompt.answer[:-1]]
    logits = model(mx.array(tokens)[None], cache=cache)[0, len(prompt.given) - 1 :]
    return np.array_equal(np.array(logits.argmax(axis=-1)), prompt.answer)


def _same_start(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts have in common at their start."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
