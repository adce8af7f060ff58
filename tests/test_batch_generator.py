"""Compact caches in mlx-lm's own batch generator: continuous batching."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from mlx_lm.generate import BatchGenerator, batch_generate

from batched import MODEL, positions_of, requests
from oracles import greedy, logits_of
from tiny_models import random_tokens, tiny_tokenizer


def alone_tokens(cache: list[Any], prompt: list[int], count: int) -> list[int]:
    """Decode one request by itself, its last token included: mlx-lm's batch runs that too."""
    if prompt[:-1]:
        logits_of(MODEL, cache, prompt[:-1])
    tokens = greedy(MODEL, cache, prompt[-1], count)[0]
    logits_of(MODEL, cache, tokens[-1:])
    return tokens


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
@pytest.mark.parametrize("tails", [(1, 1, 1, 1), (1, 6, 3, 12)], ids=["one-token", "suffixes"])
def test_batch_generate_like_each_request_alone(
    order: tuple[int, ...], tails: tuple[int, ...]
) -> None:
    """Requests also end at different times, so that the batch is filtered as it goes."""
    caches = [requests()[i] for i in order]
    prompts = [random_tokens(n, seed=20 + n) for n in tails]
    limits = [3, 12, 7, 9]
    response = batch_generate(
        MODEL,
        tiny_tokenizer(),
        copy.deepcopy(prompts),
        prompt_caches=[list(cache) for cache in caches],
        max_tokens=limits,
        return_token_ids=True,
        return_prompt_caches=True,
    )
    assert response.token_ids is not None and response.caches is not None
    for i, (which, prompt) in enumerate(zip(order, prompts, strict=True)):
        alone = requests()[which]
        assert response.token_ids[i] == alone_tokens(alone, prompt, limits[i])
        for ours, theirs in zip(response.caches[i], alone, strict=True):
            assert (ours.offset, positions_of(ours)) == (theirs.offset, positions_of(theirs))


@pytest.mark.parametrize("order", [(3, 0, 1, 2), (0, 3, 2, 1)])
def test_requests_join_while_others_decode(order: tuple[int, ...]) -> None:
    """Continuous batching: each request arrives two steps after the one before."""
    generator = BatchGenerator(MODEL, max_tokens=9, prefill_step_size=4)
    prompts = {i: random_tokens(5 + i, seed=40 + i) for i in order}
    waiting, made, who = list(order), {i: [] for i in order}, {}
    final: dict[int, list[Any]] = {}
    while waiting or len(final) < len(order):
        if waiting:
            index = waiting.pop(0)
            (uid,) = generator.insert(
                [list(prompts[index])], caches=[[copy.deepcopy(c) for c in requests()[index]]]
            )
            who[uid] = index
        for _ in range(2):
            for response in generator.next()[1]:
                made[who[response.uid]].append(response.token)
                if response.finish_reason is not None:
                    assert response.prompt_cache is not None
                    final[who[response.uid]] = response.prompt_cache
    generator.close()
    for index in order:
        alone = requests()[index]
        assert made[index] == alone_tokens(alone, prompts[index], 9)
        assert [(c.offset, positions_of(c)) for c in final[index]] == [
            (c.offset, positions_of(c)) for c in alone
        ]
