"""Gated heads: open gates are stock, closed ones stock under the streaming mask."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from head_samples import LENGTH, START, random_sample, tiny_settings
from kvkeep.attention import install
from kvkeep.heads.forward import HeadShape, Prefilled, head_shape
from kvkeep.heads.gates import GateLoss, GateTraining, ramp
from kvkeep.heads.layers import GatedLayer, Streaming
from oracles import evicted_mask, numpy_llama
from tiny_models import parameters_of, tiny_llama

STREAMING = Streaming(sinks=2, recent=5)
TOKENS = list(random_sample(0).tokens)
STARTS = pytest.mark.parametrize("start", [0, START], ids=["from the start", "after a prefix"])


def gated_logits(model: Any, gates: Any, start: int) -> np.ndarray:
    """Logits [n - start, vocabulary] of `TOKENS`, with gates [L, H_kv] from `start` on."""
    install(model)
    shape = head_shape(model)
    table = dict(zip(shape.layers, mx.array(np.asarray(gates, np.float32)), strict=True))
    cache, _ = Prefilled(model, model, shape, TOKENS[:start]).light(
        lambda index, rows: GatedLayer(table[index], STREAMING, rows)
    )
    return np.asarray(model(mx.array(TOKENS[start:])[None], cache=cache)[0])


def stock_logits(model: Any, start: int) -> np.ndarray:
    cache = make_prompt_cache(model)
    if start:
        model(mx.array(TOKENS[:start])[None], cache=cache)
    return np.asarray(model(mx.array(TOKENS[start:])[None], cache=cache)[0])


def streaming_mask(start: int) -> np.ndarray:
    """What a closed head reads, written from the definition: bool [n, n]."""
    if start:
        kept = [*range(STREAMING.sinks), *range(start - STREAMING.recent, start)]
        return evicted_mask(LENGTH, [kept], start)[0]
    mask = np.zeros((LENGTH, LENGTH), bool)
    for query in range(LENGTH):
        for row in range(query + 1):
            mask[query, row] = row < STREAMING.sinks or query - row < STREAMING.recent
    return mask


@STARTS
def test_open_gates_are_the_stock_model_bit_for_bit(start: int) -> None:
    model = tiny_llama()
    np.testing.assert_array_equal(
        gated_logits(model, np.ones((2, 2)), start), stock_logits(model, start)
    )


@STARTS
@pytest.mark.parametrize("seed", [0, 1])
def test_closed_gates_are_the_model_under_the_streaming_mask(start: int, seed: int) -> None:
    model = tiny_llama(layers=3, seed=seed)
    gates = np.random.default_rng(seed).integers(0, 2, (3, 2))
    gates[0] = 0, 1  # both kinds in one layer
    causal = np.tril(np.ones((LENGTH, LENGTH), bool))
    allowed = np.where(gates[:, :, None, None] == 1, causal, streaming_mask(start))
    expected = numpy_llama(model, TOKENS, allowed)[start:]
    found = gated_logits(model, gates, start)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.abs(stock_logits(model, start) - expected).max() > 1e-2 * np.abs(expected).max()


def test_half_open_gates_mix_the_two_outputs() -> None:
    """One layer and a linear reading of it: the mixture of attention outputs is seen at once."""
    layer = GatedLayer(mx.array([0.3, 1.0]), STREAMING)
    random = np.random.default_rng(0)
    q, k, v = (
        mx.array(random.standard_normal((1, heads, 20, 8)).astype(np.float32))
        for heads in (4, 2, 2)
    )

    def stock(q: Any, k: Any, v: Any, mask: Any, **rest: Any) -> mx.array:
        rest.pop("cache")
        return mx.fast.scaled_dot_product_attention(q, k, v, mask=mask, **rest)

    found = np.asarray(layer.attend(stock, q, k, v, scale=0.5, sinks=None))
    full, part = (
        np.asarray(mx.fast.scaled_dot_product_attention(q, k, v, scale=0.5, mask=mask))
        for mask in ("causal", STREAMING.mask(0, 20))
    )
    gates = np.array([0.3, 0.3, 1.0, 1.0])[:, None, None]  # the group's query heads share one
    np.testing.assert_allclose(found[0], gates * full[0] + (1 - gates) * part[0], atol=1e-6)
    assert np.abs(full[0, 0] - part[0, 0]).max() > 1e-2


@STARTS
def test_gradients_match_finite_differences(start: int) -> None:
    model = tiny_llama()
    settings = tiny_settings(reg=0.3, streaming_from="question" if start else "start")
    loss = GateLoss(model, head_shape(model), random_sample(0), settings)
    install(model)
    gates = mx.array([[0.6, 0.4], [0.3, 0.8]])
    gradient = np.asarray(mx.grad(loss)(gates))
    step = 2e-2
    for layer in range(2):
        for head in range(2):
            shift = np.zeros((2, 2), np.float32)
            shift[layer, head] = step
            up, down = (float(np.asarray(loss(gates + s * mx.array(shift)))) for s in (1, -1))
            difference = (up - down) / (2 * step)
            assert abs(gradient[layer, head] - difference) < 2e-2 * np.abs(gradient).max()
    assert np.abs(gradient - 0.3 / 4).min() > 1e-4  # every gate has a say beyond the L1 term


def test_the_loss_is_nothing_but_the_open_gates_own_weight() -> None:
    model = tiny_llama()
    install(model)
    loss = GateLoss(model, head_shape(model), random_sample(0), tiny_settings(reg=0.5))
    assert float(np.asarray(loss(mx.ones((2, 2))))) == pytest.approx(0.5, abs=1e-9)
    assert float(np.asarray(loss.difference(mx.zeros((2, 2))))) > 1e-3


@pytest.mark.parametrize("streaming_from", ["question", "start"])
def test_a_head_that_says_nothing_closes_and_one_that_matters_stays_open(
    streaming_from: str,
) -> None:
    """The values of head 0 of layer 1 are zero, so both its outputs are equal."""
    model = tiny_llama(layers=2, seed=3)
    attention = model.layers[1].self_attn
    silent = mx.array(np.repeat([0.0, 1.0], 16).astype(np.float32))[:, None]
    attention.v_proj.weight = attention.v_proj.weight * silent
    attention.o_proj.weight = attention.o_proj.weight * 4
    install(model)
    settings = tiny_settings(steps=40, reg=0.05, streaming_from=streaming_from)
    training = GateTraining(model, head_shape(model), random_sample, settings)
    state = training.start()
    for index in range(settings.samples):
        state = training.advance(state, index)
    gates = np.asarray(training.scores(state, 40))
    assert gates[1, 0] == 0
    assert gates[1, 1] > 0.8
    assert ((gates >= 0) & (gates <= 1)).all()


def test_texts_that_come_again_are_the_same_ones_read_once() -> None:
    model = tiny_llama()
    install(model)
    seen: list[int] = []

    def samples(index: int) -> Any:
        seen.append(index)
        return random_sample(index)

    settings = tiny_settings(texts=2)
    training = GateTraining(model, head_shape(model), samples, settings)
    state = training.start()
    for index in range(5):
        state = training.advance(state, index)
    assert seen == [0, 1]
    plain = GateTraining(model, head_shape(model), lambda i: random_sample(i % 2), tiny_settings())
    other = plain.start()
    for index in range(5):
        other = plain.advance(other, index)
    for name in state:
        np.testing.assert_array_equal(np.asarray(state[name]), np.asarray(other[name]))


@pytest.mark.parametrize("streaming_from", ["question", "start"])
def test_training_leaves_the_model_as_it_was(streaming_from: str) -> None:
    model = tiny_llama(sliding_layers=[0], sliding_window=8)
    before = parameters_of(model)
    install(model)
    assert head_shape(model) == HeadShape((1,), 2)
    training = GateTraining(
        model, head_shape(model), random_sample, tiny_settings(streaming_from=streaming_from)
    )
    state = training.advance(training.start(), 0)
    assert state["gates"].shape == (1, 2)
    after = parameters_of(model)
    for name, weight in before.items():
        np.testing.assert_array_equal(after[name], weight)


@STARTS
def test_sliding_layers_pass_through(start: int) -> None:
    model = tiny_llama(sliding_layers=[0], sliding_window=8)
    np.testing.assert_array_equal(
        gated_logits(model, np.ones((1, 2)), start), stock_logits(model, start)
    )


def test_the_learning_rate_rises_stays_and_falls() -> None:
    rates = [ramp(step, 100) for step in range(100)]
    assert rates[0] == 0.1
    assert rates[:21] == sorted(rates[:21])
    assert set(rates[20:80]) == {1.0}
    assert rates[80:] == sorted(rates[80:], reverse=True)
    assert rates[99] == 0.1
    assert all(0.1 <= ramp(step, n) <= 1 for n in range(1, 12) for step in range(n))
