"""Divergence from the exact cache: nothing where nothing is evicted, else what float64 says."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluations import numbers, results_file
from kvkeep import compact_prompt_cache
from kvkeep.errors import ConfigError
from kvkeep.evaluation import FidelityRecord, TextPlan, read_text, run_text, variants_of
from kvkeep.evaluation import fidelity as fidelity_module
from kvkeep.evaluation.fidelity import Predictions, divergence, predictions, stretches
from oracles import logits_of, prefilled
from tiny_models import tiny_llama, tiny_tokenizer

TEXT = "".join(chr(97 + (i * i * 7 + i // 3) % 26) for i in range(1000))


@functools.cache
def model() -> Any:
    """Sure of itself: an untrained model's predictions hardly differ."""
    sure = tiny_llama()
    sure.lm_head.weight = sure.lm_head.weight * 8
    return sure


def plan_of(policies: tuple[str, ...] = ("snapkv",), **more: Any) -> TextPlan:
    budgets = more.pop("budgets", ("25%",))
    options = {"lengths": (200,), "continuation": 150, "limit": 2, **more}
    return TextPlan("mine", TEXT, variants_of(policies, budgets), **options)


def evaluated(path: Path, plan: TextPlan, **more: Any) -> list[FidelityRecord]:
    with results_file(path, model()) as file:
        records = run_text(model(), tiny_tokenizer(), plan, file, **more)
    assert all(isinstance(record, FidelityRecord) for record in records)
    return [record for record in records if isinstance(record, FidelityRecord)]


def test_where_nothing_is_evicted_nothing_differs(tmp_path: Path) -> None:
    for record in evaluated(tmp_path / "a.jsonl", plan_of(budgets=("100%", "25%"))):
        evicts = record.budget == "25%"
        assert (record.rows < record.compressed_tokens) == evicts
        assert (record.kl == 0) == (not evicts)
        assert (max(record.kl_curve) == 0) == (not evicts)
        assert (record.perplexity == record.exact_perplexity) == (not evicts)
        if not evicts:
            assert record.agreement == 1
            assert record.loss_curve == record.exact_loss_curve


def log_softmax(logits: np.ndarray) -> np.ndarray:
    rows = logits.astype(np.float64)
    rows = rows - rows.max(-1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(-1, keepdims=True))


def test_curves_are_those_of_float64(tmp_path: Path) -> None:
    """Both caches made by hand and stepped token by token."""
    plan = plan_of(("snapkv", "random"))
    records = evaluated(tmp_path / "a.jsonl", plan)
    assert [(r.index, r.policy) for r in records] == [
        (index, policy) for index in range(2) for policy in ("none", "snapkv", "random")
    ]
    ids = tiny_tokenizer().encode(TEXT)
    for record in records:
        mine = ids[record.index * 350 : (record.index + 1) * 350]
        first, rest = mine[:199], mine[199:]
        exact = prefilled(model(), first)
        (variant,) = [v for v in plan.variants if v.setting == record.setting]
        other = prefilled(model(), first)
        if variant.config is not None:
            other = compact_prompt_cache(model(), first, config=variant.config).cache
        told = [
            log_softmax(np.concatenate([logits_of(model(), cache, [t]) for t in rest[:-1]]))
            for cache in (exact, other)
        ]
        p, q = told
        kl = (np.exp(p) * (p - q)).sum(-1)
        np.testing.assert_allclose(record.kl_curve, kl, atol=1e-5)
        at = np.arange(150)
        np.testing.assert_allclose(record.exact_loss_curve, -p[at, rest[1:]], atol=1e-5)
        np.testing.assert_allclose(record.loss_curve, -q[at, rest[1:]], atol=1e-5)
        agree = p.argmax(-1) == q.argmax(-1)
        np.testing.assert_array_equal(record.agreement_curve, agree)
        assert record.kl == pytest.approx(kl.mean(), abs=1e-5)
        assert record.agreement == pytest.approx(agree.mean())
        assert record.perplexity == pytest.approx(math.exp(-q[at, rest[1:]].mean()), rel=1e-4)
        assert record.length == 200
        assert record.compressed_tokens == 199
    assert any(record.kl > 0.01 for record in records)


def test_a_token_that_cannot_be_said_adds_nothing() -> None:
    import mlx.core as mx

    never = float("-inf")
    half = math.log(0.5)
    p = Predictions((mx.array([[half, half, never]]),), (0.0,))
    q = Predictions((mx.array([[math.log(0.25), math.log(0.75), never]]),), (0.0,))
    kl, agree = divergence(p, q)
    assert kl == pytest.approx([0.5 * math.log(2) + 0.5 * math.log(2 / 3)])
    assert agree == [0]
    assert divergence(p, p) == ([0.0], [1])


def test_pieces_of_a_continuation_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tiny_tokenizer().encode(TEXT)[:300]
    whole = predictions(model(), prefilled(model(), ids[:100]), ids[100:])
    monkeypatch.setattr(fidelity_module, "_CHUNK", 7)
    pieces = predictions(model(), prefilled(model(), ids[:100]), ids[100:])
    assert len(pieces.logprobs) > len(whole.logprobs)
    np.testing.assert_allclose(pieces.loss, whole.loss, atol=1e-5)
    assert sum(len(rows) for rows in pieces.logprobs) == len(whole.loss) == 199


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evaluated(tmp_path / "a.jsonl", plan_of())
    data = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "b.jsonl").write_bytes(data[: int(len(data) * 0.8)])
    real, calls, reports = fidelity_module.read, [], []
    monkeypatch.setattr(fidelity_module, "read", lambda *a, **k: calls.append(a) or real(*a, **k))
    again = evaluated(tmp_path / "b.jsonl", plan_of(), progress=lambda *t: reports.append(t))
    assert numbers(again) == numbers(whole)
    assert (len(calls), reports[0][:2], reports[-1][:2]) == (1, (3, 4), (4, 4))


def test_stretches_do_not_overlap_and_the_text_must_hold_one() -> None:
    tokenizer = tiny_tokenizer()
    found = stretches(tokenizer, plan_of(lengths=(100, 200), continuation=50, limit=3))
    assert [(s.index, s.length) for s in found] == [
        (index, length) for index in range(3) for length in (100, 200)
    ]
    assert sum((s.tokens for s in found if s.length == 200), ()) == tuple(
        tokenizer.encode(TEXT)[:750]
    )
    assert len(stretches(tokenizer, plan_of(limit=9))) == len(TEXT) // 350
    with pytest.raises(ConfigError, match="at least 1,100 tokens"):
        stretches(tokenizer, plan_of(lengths=(1000,), continuation=100))


def test_texts_and_numbers_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    for name, message in (
        ("empty.txt", "no text"),
        ("bytes.txt", "unreadable"),
        ("none.txt", "unreadable"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_text(tmp_path / name)
    wrong: list[dict[str, Any]] = [{"lengths": (1,)}, {"continuation": 0}, {"limit": 0}]
    for options in wrong:
        with pytest.raises(ConfigError):
            plan_of(**options)
