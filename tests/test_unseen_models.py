"""Policies that need no queries, on models whose attention nobody sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from bare_models import PartlySeenModel, SeenLayer, cache_bytes, tiny_model
from kvkeep import (
    EvictionConfig,
    LayerSelection,
    LayerView,
    Selection,
    compact_prompt_cache,
    evict_selection,
    get_policy,
)
from kvkeep.attention import find_parts, install
from kvkeep.compaction import prefill_and_compact
from kvkeep.errors import CacheError, ConfigError, UnsupportedModelError
from kvkeep.policies import POLICIES
from kvkeep.selection import select_rows
from oracles import logits_of, prefilled
from tiny_models import random_tokens, tiny_bare_model
from zoo import build

TOKENS, NEXT = random_tokens(60), [7, 11, 3, 40, 22]
SEEN = {"queries", "attention", "replay"}
QUERY_FREE = [name for name, policy in POLICIES.items() if not policy.needs & SEEN]
PLAIN = [name for name in QUERY_FREE if POLICIES[name].needs <= {"keys", "values"}]
SEEING = [name for name in POLICIES if name not in (*QUERY_FREE, "snapkv-d")]


def config_of(name: str, **more: Any) -> EvictionConfig:
    settings = {"policy": name, "budget": 16, "min_tokens": 0, **more}
    return EvictionConfig.parse(settings)


def masked(model: Any, kept: list[int], tokens: list[int]) -> np.ndarray:
    """Logits of `tokens` after the prompt, evicted rows hidden by hand in stock gemma2."""
    cache = prefilled(model, TOKENS)
    rows = []
    for token in tokens:
        mask = np.ones((1, cache[0].offset + 1), bool)
        mask[:, np.setdiff1d(np.arange(60), kept)] = False
        h = model.model.embed_tokens(mx.array([[token]])) * model.args.hidden_size**0.5
        for layer, layer_cache in zip(model.layers, cache, strict=True):
            h = layer(h, mx.array(mask), layer_cache)
        out = model.model.embed_tokens.as_linear(model.model.norm(h))
        cap = model.final_logit_softcapping
        rows.append(np.asarray(mx.tanh(out / cap) * cap)[0, 0])
    return np.stack(rows)


def test_there_are_policies_of_either_kind() -> None:
    assert {"knorm", "keydiff", "lagkv", "cur", "sink_recent", "random"} <= {*QUERY_FREE}
    assert {"snapkv", "tova", "observed_attention", "kvzip"} <= {*SEEING}
    assert "leverage" in QUERY_FREE


@pytest.mark.parametrize("name", QUERY_FREE)
@pytest.mark.parametrize("store", ["auto", "shared", "per-head"])
def test_own_softmax_is_evicted_exactly(name: str, store: str) -> None:
    model = tiny_model("gemma2")
    result = compact_prompt_cache(model, TOKENS, config=config_of(name, store=store))
    assert (result.evicted, result.retained_tokens, result.true_offset) == (True, 16, 60)
    sets = {tuple(head) for layer in result.cache for head in layer.head_positions}
    assert len(sets) == 1  # one set, for every layer and head
    kept = list(sets.pop())
    right = masked(model, kept, NEXT)
    ours = [logits_of(model, result.cache, [token])[-1] for token in NEXT[:2]]
    ours += list(logits_of(model, result.cache, NEXT[2:]))
    np.testing.assert_allclose(np.stack(ours), right, rtol=1e-4, atol=1e-4)
    whole = masked(model, list(range(60)), NEXT)
    assert np.abs(whole - right).max() > 1e-3  # the rows did matter
    # Below the compaction point the layers still agree on their rows.
    for layer in result.cache:
        layer.trim(5 + 10)
    again = logits_of(model, result.cache, TOKENS[50:])
    left = [p for p in kept if p < 50]
    cache = prefilled(model, TOKENS[:50])
    exact = evict_selection(
        cache, Selection(50, dict.fromkeys((0, 1), LayerSelection((np.array(left),))))
    ).cache
    np.testing.assert_allclose(again, logits_of(model, exact, TOKENS[50:]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", QUERY_FREE)
def test_the_one_set_comes_from_the_mean_score(name: str) -> None:
    model = tiny_model("gemma2")
    cache, policy = prefilled(model, TOKENS), get_policy(name)
    rows = [[a[0] for a in layer.keys_and_values()] for layer in cache]
    parts = find_parts(model, cache, [0, 1], policy.needs, name)
    views = [LayerView(keys, values, None, 1.0, i, 2) for i, (keys, values) in enumerate(rows)]
    views = [replace(view, rope=parts[i].rope) if parts else view for i, view in enumerate(views)]
    scores = np.mean([np.asarray(policy.score(view)).mean(axis=0) for view in views], axis=0)
    (right,) = select_rows(scores, 16, sinks=4, recent=policy.default_recent(16))
    result = compact_prompt_cache(model, TOKENS, config=config_of(name))
    assert list(result.cache[0].positions) == right.tolist()


@pytest.mark.parametrize("name", QUERY_FREE)
def test_a_partly_seen_model_gets_one_set(name: str) -> None:
    model = PartlySeenModel(seen=[True, False, True], sliding=[False] * 3)
    install()
    result = compact_prompt_cache(model, TOKENS, config=config_of(name), prefill_step_size=7)
    sets = {tuple(head) for layer in result.cache for head in layer.head_positions}
    assert len(sets) == 1
    result = compact_prompt_cache(tiny_bare_model(), TOKENS, config=config_of(name))
    assert len({tuple(layer.positions) for layer in result.cache}) == 1


@pytest.mark.parametrize("name", SEEING)
def test_policies_that_need_queries_refuse_and_name_the_way_out(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'gemma2'.*a policy that needs no queries"):
        compact_prompt_cache(tiny_model("gemma2"), TOKENS, config=config_of(name))


class _SharingModel(PartlySeenModel):
    """Every layer reads the first layer's cache."""

    def __init__(self) -> None:
        super().__init__(seen=[True, True], sliding=[False, False])
        self.model_type = "sharing"

    def make_cache(self) -> list[Any]:
        return [KVCache()]

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        h = self.embed_tokens(inputs)
        for layer in self.layers:
            assert isinstance(layer, SeenLayer)
            h = layer(h, "causal", cache[0])
        return self.embed_tokens.as_linear(h)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("step", [1, 25, 2048])
def test_a_cache_that_several_layers_read_is_refused(
    name: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    model, cache, evaluations = _SharingModel(), [KVCache()], []
    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", lambda *arrays: evaluations.append(arrays))
        with pytest.raises(UnsupportedModelError, match="'sharing' reads one layer's cache from"):
            prefill_and_compact(model, TOKENS, cache, config_of(name), step=step)
    assert evaluations == []
    assert (cache[0].keys, cache[0].offset) == (None, 0)  # as it came
    # With nothing to evict nothing is refused.
    result = prefill_and_compact(model, TOKENS, cache, config_of(name, budget=200), step=step)
    assert not result.evicted


@pytest.mark.parametrize("name", PLAIN)
def test_scores_in_the_mask_get_one_set(name: str) -> None:
    """Latent attention: its mask, made by the first cache, carries scores for every layer."""
    result = compact_prompt_cache(tiny_model("deepseek_v3"), TOKENS, config=config_of(name))
    sets = {tuple(head) for layer in result.cache for head in layer.head_positions}
    assert result.evicted and len(sets) == 1


def test_latent_queries_that_are_not_rotated_cannot_be_seen() -> None:
    """Without a rotation nothing shows the part of the queries that scores through the mask."""
    with pytest.raises(UnsupportedModelError, match=r"'kimi_linear' adds positional.*keydiff"):
        compact_prompt_cache(build("kimi_linear"), TOKENS, config=config_of("span"))


@pytest.mark.parametrize("store", ["ragged", "union"])
def test_one_set_is_kept_in_one_array(store: str) -> None:
    with pytest.raises(ConfigError, match="'gemma2' reads a layer's rows as one array"):
        compact_prompt_cache(tiny_model("gemma2"), TOKENS, config=config_of("knorm", store=store))


def test_layers_that_hold_different_rows_cannot_go_on_with_one_set() -> None:
    model = tiny_model("gemma2")
    cache = prefilled(model, TOKENS)
    rows = [LayerSelection((np.arange(i, 40 + i),)) for i in range(2)]
    compact = evict_selection(cache, Selection(60, dict(enumerate(rows)))).cache
    before = [repr(layer) for layer in cache_bytes(compact)]
    with pytest.raises(CacheError, match="this model's own attention"):
        prefill_and_compact(model, NEXT, compact, config_of("knorm"))
    assert [repr(layer) for layer in cache_bytes(compact)] == before
