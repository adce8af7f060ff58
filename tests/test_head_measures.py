"""Scores without training, against the definition in float64."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from head_samples import LENGTH, START, random_sample, tiny_settings
from kvkeep.attention import install
from kvkeep.heads import Sample, profile_heads, score_table
from kvkeep.heads.forward import Prefilled, head_shape
from kvkeep.heads.layers import MeasuredLayer, late_attention
from kvkeep.heads.measures import outside_mass, recall_mass
from tiny_models import tiny_llama, tiny_tokenizer

SETTINGS = tiny_settings(method="estimate", sinks=2, recent=5)


def rows(heads: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((heads, LENGTH, 8)).astype(np.float32)


def weights_of(q: np.ndarray, k: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """Causal attention weights [H_q, n, n] in float64, row by row."""
    group = len(q) // len(k)
    table = np.zeros((len(q), LENGTH, LENGTH))
    for head in range(len(q)):
        for row in range(LENGTH):
            logits = k[head // group, : row + 1].astype(np.float64) @ q[head, row] * 0.7
            extra = 0.0 if sinks is None else np.exp(float(sinks[head]))
            table[head, row, : row + 1] = np.exp(logits) / (np.exp(logits).sum() + extra)
    return table


@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_estimate_is_what_streaming_rows_do_not_hold(with_sinks: bool) -> None:
    q, k = rows(4, 0), rows(2, 1)
    sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32) if with_sinks else None
    table, expected = weights_of(q, k, sinks), np.zeros((4, 2))
    for head in range(4):
        for part, queries in enumerate((range(START), range(START, LENGTH))):
            for row in queries:
                lost = [j for j in range(row + 1) if j >= 2 and row - j >= 5]
                expected[head, part] += table[head, row, lost].sum() / len(queries)
    measure = outside_mass(random_sample(0), SETTINGS)
    found = measure(mx.array(q), mx.array(k), 0.7, None if sinks is None else mx.array(sinks))
    np.testing.assert_allclose(np.asarray(found), expected.mean(1).reshape(2, 2).mean(1), rtol=1e-4)


def test_recall_is_attention_to_the_place_that_is_copied() -> None:
    q, k = rows(4, 2), rows(2, 3)
    table, per_head = weights_of(q, k, None), []
    for head in range(4):
        got = [table[head, row, 10:13].sum() for row in (43, 44, 45)]
        got += [table[head, row, 20:23].sum() for row in (50, 51, 52)]
        per_head.append(np.mean(got))
    found = recall_mass(random_sample(0))(mx.array(q), mx.array(k), 0.7, None)
    np.testing.assert_allclose(
        np.asarray(found), np.array(per_head).reshape(2, 2).max(1), rtol=1e-4
    )


def test_late_rows_see_no_later_ones() -> None:
    q, k = mx.array(rows(2, 4)), mx.array(rows(2, 5))
    weights = np.asarray(late_attention(q[:, 50:], k, 0.7, None, mx.array([0, 3])))
    assert weights.shape == (2, 1, 2, LENGTH)
    assert (weights[:, :, 0, 51:] == 0).all() and (weights[:, :, 1, 54:] == 0).all()
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize("method", ["estimate", "recall"])
def test_a_profile_is_the_mean_over_samples_of_what_the_layers_saw(method: str) -> None:
    model = tiny_llama(layers=3)
    settings = tiny_settings(method=method, steps=2)
    found = score_table(profile_heads(model, tiny_tokenizer(), settings, samples=random_sample))
    install(model)
    expected = []
    for index in range(2):
        sample, seen = random_sample(index), []

        def record(*call: Any, into: list[Any] = seen) -> mx.array:
            into.append(call)
            return mx.zeros(2)

        cache, _ = Prefilled(model, model, head_shape(model), ()).light(
            lambda _, rows, record=record: MeasuredLayer(record, rows)
        )
        logits = model(mx.array(list(sample.tokens))[None], cache=cache)
        stock = model(mx.array(list(sample.tokens))[None])
        np.testing.assert_array_equal(np.asarray(logits), np.asarray(stock))
        measure = recall_mass(sample) if method == "recall" else outside_mass(sample, settings)
        expected.append([np.asarray(measure(*call)) for call in seen])
    np.testing.assert_allclose(found, np.mean(expected, axis=0), rtol=1e-5)


@pytest.mark.parametrize(
    ("method", "least"),
    [
        ("optimise", 0.9),
        ("recall", 0.49),  # it reads two needles at once, and one of them is the right one
        ("estimate", 0.7),  # the latest rows of the text still hold a needle
    ],
)
def test_a_hand_built_retrieval_head_is_told_from_a_sink_head(method: str, least: float) -> None:
    """Head 0 reads the first token and nothing else, head 1 the needles: both say something."""
    model, samples = sink_and_retrieval_heads(), needle_sample
    settings = tiny_settings(method=method, steps=40)
    table = score_table(profile_heads(model, tiny_tokenizer(), settings, samples=samples))
    assert table.shape == (1, 2)
    assert table[0, 0] < 0.01
    assert table[0, 1] > least


def sink_and_retrieval_heads() -> Any:
    """One layer; embeddings carry a constant, a flag of token 0, and one of tokens 1 to 7."""
    model = tiny_llama(layers=1, heads=2, kv_heads=2, head_dim=32, hidden=32, seed=1)
    random = np.random.default_rng(0)
    embedding = random.standard_normal((64, 32))
    embedding[:, :3] = 3, 0, 0
    embedding[0, 1] = embedding[1:8, 2] = 5
    model.model.embed_tokens.weight = mx.array(embedding.astype(np.float32))
    attention = model.layers[0].self_attn
    attention.rope.base = 1e30
    queries, keys = np.zeros((2, 2, 32, 32))
    queries[:, 15, 0] = 10  # of the pairs that RoPE turns, this one hardly moves
    keys[0, 15, 1] = keys[1, 15, 2] = 10
    attention.q_proj.weight = mx.array(queries.reshape(64, 32).astype(np.float32))
    attention.k_proj.weight = mx.array(keys.reshape(64, 32).astype(np.float32))
    attention.o_proj.weight = attention.o_proj.weight * 4
    return model


def needle_sample(index: int) -> Sample:
    """Flagged tokens in the needles alone, token 0 at the start."""
    random = np.random.default_rng(index)
    sample = random_sample(index)
    tokens = random.integers(8, 64, LENGTH)
    tokens[0] = 0
    for recall in sample.recalls:
        tokens[slice(*recall.needle)] = random.integers(1, 8, 3)
    return Sample(tuple(tokens.tolist()), sample.recall_start, sample.recalls)
