"""Runs on tiny models: every store and batch, rows and bytes as they are, and going on."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache

import kvkeep
from kvkeep.bench import (
    BenchPlan,
    DecodeResult,
    Device,
    ModelFacts,
    PromptResult,
    ResultsFile,
    SyntheticShape,
    Workload,
    combined,
    parse_lengths,
    read_report,
    run_bench,
    running,
    stock_prefill,
)
from kvkeep.bench.decoding import BatchStepper, Rounds, SingleStepper, decode
from kvkeep.bench.prompting import read_prompt
from kvkeep.bench.workloads import first_rows, prose_tokens
from kvkeep.compaction import cache_nbytes, compact_prefilled
from kvkeep.errors import ConfigError, KvkeepError
from oracles import logits_of, prefilled
from tiny_models import parameters_of, random_tokens, tiny_llama, tiny_tokenizer

SHAPE = SyntheticShape(layers=2, heads=4, kv_heads=2, dim=16, hidden=32, vocab=64)
STORES = ("shared", "per-head", "ragged", "union")
LENGTH, LAYERS, KV_HEADS, DIM = 160, 2, 2, 16
ROW = 2 * DIM * 4 * LAYERS  # bytes of a row of one head in all layers, K and V


def settings(*stores: str, policy: str = "span", budget: str = "40%") -> tuple[Any, ...]:
    return combined([policy], [budget], stores)[0]


def plan(*stores: str, **changes: Any) -> BenchPlan:
    known: dict[str, Any] = {"tokens": 3, "rounds": 2, "prompt_rounds": 2, "batches": (1, 2)}
    chosen = changes.pop("settings", None) or settings(*(stores or STORES))
    return BenchPlan(**{"lengths": (LENGTH,), "settings": chosen, **known, **changes})


def a_real() -> Workload:
    return Workload.real(tiny_llama(), tiny_tokenizer(), "tiny")


def a_random(dtype: str = "float32") -> Workload:
    return Workload.random(SHAPE, dtype)


def run(workload: Workload, asked: BenchPlan, path: Path | None = None) -> ResultsFile:
    file = ResultsFile(path, Device.present(), workload.facts)
    try:
        run_bench(workload, asked, file)
    finally:
        file.end()
    return file


@pytest.fixture(scope="module", params=["real", "random"])
def report(request: pytest.FixtureRequest) -> Any:
    return run(a_real() if request.param == "real" else a_random(), plan()).report


def test_every_store_and_batch_runs_beside_the_exact_and_the_bound(report: Any) -> None:
    assert [(type(r), r.length) for r in report.results] == [
        (PromptResult, LENGTH), (DecodeResult, LENGTH), (DecodeResult, LENGTH),
    ]  # fmt: skip
    assert [result.batch for result in report.decodes] == [1, 2]
    for result in report.decodes:
        assert [run.role for run in result.runs] == ["exact", "bound", *["evicted"] * 4]
        assert [run.setting.store for run in result.runs[2:]] == list(STORES)
        assert [run.rows for run in result.runs] == [LENGTH, *[64] * 5]
        assert result.rounds == 2
        for run_ in result.runs:
            speeds = np.array(result.speeds(run_))
            np.testing.assert_allclose(speeds * run_.seconds, result.batch * 3)


def test_bytes_are_those_of_the_rows(report: Any) -> None:
    (prompt,) = report.prompts
    exact, kept = LENGTH * KV_HEADS * ROW, 64 * KV_HEADS * ROW
    for found in prompt.compactions:
        assert (found.rows, found.exact_nbytes) == (64, exact)
        assert found.stored == found.setting.store
        if found.stored == "union":  # what either head keeps
            assert kept < found.compact_nbytes <= 2 * kept
        else:
            assert found.compact_nbytes == kept == found.compact_allocated
    for result in report.decodes:
        live = {found.setting.store: found.compact_nbytes for found in prompt.compactions}
        for run_ in result.runs:
            one = {"exact": exact, "bound": kept}.get(run_.role) or live[run_.setting.store]
            assert run_.live_nbytes == result.batch * one
            # mlx-lm's caches and kvkeep's grow in steps of 256 rows.
            assert run_.allocated_nbytes > run_.live_nbytes
            assert run_.peak_nbytes >= report.model.weights_nbytes + run_.allocated_nbytes


def test_a_prefill_is_measured_where_there_is_one(report: Any) -> None:
    (prompt,) = report.prompts
    if report.model.synthetic:
        assert (prompt.stock_seconds, prompt.prefills) == ((), ())
        return
    (span,) = prompt.prefills
    assert span.setting == prompt.compactions[0].setting
    assert len(prompt.stock_seconds) == len(span.seconds) == len(span.score_seconds) == 2
    assert min(prompt.stock_peak_nbytes) > report.model.weights_nbytes
    # The exact cache is there at the prefill's end, whoever reads it.
    assert min(span.peak_nbytes) > report.model.weights_nbytes + LENGTH * KV_HEADS * ROW


@pytest.mark.parametrize("policy", ["lookahead", "snapkv-d", "knorm", "compactor", "kvzip"])
def test_what_decodes_is_what_compact_prompt_cache_gives(policy: str) -> None:
    workload = a_real()
    asked = plan(settings=settings("auto", policy=policy), prefill_step=50)
    prompt, _ = read_prompt(workload, asked, LENGTH, 0, print, measure=False)
    ((config, kept),) = prompt.evicted.items()
    theirs = kvkeep.compact_prompt_cache(
        workload.model, prompt.tokens, config=config, prefill_step_size=50
    )
    assert kept.evicted and kept.retained_tokens == theirs.retained_tokens
    for mine, other in zip(kept.cache, theirs.cache, strict=True):
        assert mine.head_positions == other.head_positions
        rows = zip(mine.keys_and_values(), other.keys_and_values(), strict=True)
        assert all(mx.array_equal(a, b) for a, b in rows)
    stock = stock_prefill(workload.model, prompt.tokens, 50)
    for mine, other in zip(prompt.exact, stock, strict=True):
        assert type(mine) is KVCache and mine.offset == LENGTH
        for a, b in zip(mine.keys_and_values(), other.keys_and_values(), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_random_rows_are_evicted_as_a_prefilled_cache_is() -> None:
    workload, asked = a_random(), plan("per-head")
    prompt, _ = read_prompt(workload, asked, LENGTH, 0, print, measure=False)
    ((config, kept),) = prompt.evicted.items()
    theirs = compact_prefilled(workload.model, prompt.tokens, prompt.exact, config)
    for mine, other in zip(kept.cache, theirs.cache, strict=True):
        assert mine.head_positions == other.head_positions


def test_the_same_rows_for_a_seed_and_others_for_another() -> None:
    def rows(seed: int) -> Any:
        asked = plan("shared", seed=seed)
        prompt, _ = read_prompt(a_random(), asked, LENGTH, 0, print, measure=False)
        return prompt.exact[1].keys

    assert mx.array_equal(rows(1), rows(1))
    assert not mx.array_equal(rows(1), rows(2))


class Counted:
    """A model that counts its forward calls."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls = model, 0

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        self.calls += 1
        return self.model(*args, **options)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_round_is_so_many_steps_and_starts_from_the_same_rows(batch: int) -> None:
    model = Counted(tiny_llama())
    caches = [prefilled(model.model, random_tokens(30), 64) for _ in range(batch)]
    stepper: Any = (
        SingleStepper(model, caches[0], 7) if batch == 1 else BatchStepper(model, caches, 7)
    )
    rounds = Rounds(stepper, 5)
    assert model.calls == stepper.started
    for done in (1, 2, 3):
        assert rounds() > 0
        assert model.calls == stepper.started + 5 * done
        for layer in stepper.cache:
            assert np.asarray(layer.offset).tolist() == (30 if batch == 1 else [30] * batch)
            assert layer.keys_and_values()[0].shape[2] == 30


def test_state_that_cannot_be_taken_back_goes_on() -> None:
    model = tiny_llama(sliding_layers=(0,), sliding_window=8)
    cache = prefilled(model, random_tokens(30), 64)
    assert type(cache[0]) is RotatingKVCache
    rounds = Rounds(SingleStepper(model, cache, 7), 5)
    rounds()
    assert {layer.offset for layer in cache} == {30 + 2 + 5}


def test_the_prompts_caches_stay_as_they_are() -> None:
    workload, asked = a_random(), plan()
    prompt, _ = read_prompt(workload, asked, LENGTH, 0, print, measure=False)

    def state() -> list[Any]:
        caches = [prompt.exact, *(kept.cache for kept in prompt.evicted.values())]
        return [np.asarray(mx.sum(layer.keys)) for cache in caches for layer in cache]

    before = state()
    decode(workload, asked, prompt, 2, 0, print)
    np.testing.assert_array_equal(state(), before)
    assert cache_nbytes(prompt.exact) == LENGTH * KV_HEADS * ROW


def test_the_bound_is_a_stock_cache_of_the_first_rows() -> None:
    model = tiny_llama()
    tokens = random_tokens(60)
    cut = first_rows(prefilled(model, tokens, 64), 25)
    assert all(type(layer) is KVCache and layer.offset == 25 for layer in cut)
    np.testing.assert_array_equal(
        logits_of(model, cut, [3]), logits_of(model, prefilled(model, tokens[:25], 64), [3])
    )
    merged = [layer.merge([layer, layer]) for layer in cut]
    assert all(type(layer) is BatchKVCache for layer in merged)


def test_a_bound_for_each_number_of_rows() -> None:
    chosen = combined(["span"], ["40%", "50", "64"], ["auto"])[0]
    (result,) = run(a_random(), plan(settings=chosen, batches=(1,))).report.decodes
    assert [(run_.role, run_.rows) for run_ in result.runs] == [
        ("exact", 160), ("bound", 64), ("bound", 50),
        ("evicted", 64), ("evicted", 50), ("evicted", 64),
    ]  # fmt: skip


def test_several_policies_and_allocations_share_a_run() -> None:
    chosen, refused = combined(
        ["span", "snapkv-d"], ["40%"], ["auto", "shared"], ["uniform", "adaptive"]
    )
    assert len(chosen) == 5  # adaptive tells heads apart: not shared, not snapkv-d
    assert any("one score for all of them" in reason for reason in refused)
    assert any("unequal numbers" in reason for reason in refused)
    (prompt,) = run(a_real(), plan(settings=chosen, batches=(1,))).report.prompts
    assert [str(p.setting) for p in prompt.prefills] == ["span 40%, auto", "snapkv-d 40%, auto"]
    assert [c.stored for c in prompt.compactions] == [
        "per-head", "shared", "ragged", "shared", "shared",
    ]  # fmt: skip


def test_dtype_is_that_of_the_rows() -> None:
    file = run(a_random("bfloat16"), plan("shared", batches=(1,)))
    assert file.report.model.dtype == "bfloat16"
    assert file.report.decodes[0].exact.live_nbytes == LENGTH * KV_HEADS * ROW // 2


def test_lengths_and_budgets_that_evict_nothing_are_left_out() -> None:
    chosen = combined(["span"], ["100", "80KB"], ["auto"])[0]  # 80 KB hold 156 rows
    asked = plan(settings=chosen, lengths=(90, 160), batches=(1,))
    with pytest.raises(ConfigError, match="nothing is evicted of 90 tokens"):
        run(a_random(), asked)
    file = run(a_random(), dataclasses.replace(asked, lengths=(160,)))
    assert len(file.report.prompts[0].compactions) == 2
    alone = dataclasses.replace(asked, settings=chosen[:1])
    with pytest.raises(ConfigError, match="nothing is evicted of 90 tokens"):
        alone.require_evicting()


def test_policies_that_must_see_a_prefill_are_refused_on_random_rows() -> None:
    with pytest.raises(ConfigError, match="'kvzip' must see the whole prefill"):
        run(a_random(), plan(settings=settings("auto", policy="kvzip")))


# -- a file, and going on ----------------------------------------------------------------


def measured(monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None) -> list[tuple[int, int]]:
    """Which (length, batch) decode; the `fail_at`-th is interrupted."""
    calls: list[tuple[int, int]] = []
    original = decode

    def spied(workload: Any, asked: Any, prompt: Any, batch: int, *rest: Any) -> DecodeResult:
        calls.append((len(prompt.tokens), batch))
        if len(calls) == fail_at:
            raise KeyboardInterrupt
        return original(workload, asked, prompt, batch, *rest)

    monkeypatch.setattr(running, "decode", spied)
    return calls


def test_an_interrupted_run_leaves_a_valid_file_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.jsonl"
    asked = plan("per-head", lengths=(160, 100))
    with monkeypatch.context() as patch:
        assert measured(patch, fail_at=2) == []
        with pytest.raises(KeyboardInterrupt):
            run(a_random(), asked, path)
    half = read_report(path)
    assert [type(r) for r in half.results] == [PromptResult, DecodeResult]
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.jsonl"]

    calls = measured(monkeypatch)
    whole = run(a_random(), asked, path).report
    assert calls == [(160, 2), (100, 1), (100, 2)]
    assert whole == read_report(path)
    assert whole.results[:2] == half.results
    assert [(p.length, p.session) for p in whole.prompts] == [(160, 0), (100, 1)]
    assert [(d.length, d.batch) for d in whole.decodes] == [(160, 1), (160, 2), (100, 1), (100, 2)]

    calls.clear()
    assert run(a_random(), asked, path).report == whole  # nothing is left to do
    assert calls == []


@pytest.mark.parametrize(
    "change",
    [{"tokens": 4}, {"rounds": 3}, {"seed": 5}, {"settings": settings("shared")}],
)
def test_other_rounds_or_settings_are_measured_anew(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.jsonl"
    asked = plan("per-head", batches=(1,))
    run(a_random(), asked, path)
    calls = measured(monkeypatch)
    run(a_random(), dataclasses.replace(asked, **change), path)
    assert calls == [(LENGTH, 1)]
    assert len(read_report(path).decodes) == 2


def test_a_byte_budget_that_evicts_nothing_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.jsonl"
    asked = plan(settings=combined(["span"], ["40%", "1GB"], ["auto"])[0], batches=(1,))
    assert len(run(a_random(), asked, path).report.prompts[0].compactions) == 1
    calls = measured(monkeypatch)
    run(a_random(), asked, path)
    assert calls == []


# -- what is asked for -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "lengths"), [("512,1k,32K", (512, 1024, 32_768)), (" 7 , ", (7,))]
)
def test_lengths_are_read(text: str, lengths: Sequence[int]) -> None:
    assert parse_lengths(text) == tuple(lengths)


@pytest.mark.parametrize("text", ["1kk", "-5", "0", "1.5k", "k", "0k"])
def test_unreadable_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="unreadable lengths"):
        parse_lengths(text)


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": ()},
        {"settings": ()},
        {"batches": ()},
        {"lengths": (0,)},
        {"batches": (0,)},
        {"tokens": 0},
        {"rounds": 0},
        {"prompt_rounds": 0},
        {"prefill_step": 0},
        {"seed": -1},
    ],
)
def test_a_plan_of_nothing_is_refused(change: dict[str, Any]) -> None:
    known: dict[str, Any] = {"lengths": (9,), "settings": settings("auto"), **change}
    with pytest.raises(ConfigError):
        BenchPlan(**known)


def test_a_plan_names_each_thing_once() -> None:
    twice = BenchPlan((9, 9), settings("auto") * 2, batches=(2, 1, 2))
    assert (twice.lengths, len(twice.settings), twice.batches) == ((9,), 1, (2, 1))


def test_a_combination_that_has_no_meaning_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="unequal numbers"):
        combined(["span"], ["25%"], ["shared"], ["adaptive"])
    with pytest.raises(KvkeepError, match="spam"):
        combined(["span", "spam"], ["25%"], ["auto"])


def test_a_shape_is_read_and_written() -> None:
    shape = SyntheticShape.parse("layers=3, kv-heads=4,hidden=64")
    assert (shape.layers, shape.kv_heads, shape.hidden, shape.mlp) == (3, 4, 64, 192)
    assert SyntheticShape.parse(str(shape)) == shape
    assert SyntheticShape.parse("") == SyntheticShape()


@pytest.mark.parametrize(
    "text",
    ["depth=3", "layers", "layers=x", "layers=0", "layers=2,layers=3", "kv_heads=5", "dim=7"],
)
def test_a_shape_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="synthetic"):
        SyntheticShape.parse(text)


def test_a_random_model_has_its_shape() -> None:
    shape = SyntheticShape(3, heads=6, kv_heads=2, dim=8, hidden=24, mlp=40, vocab=50)
    model = shape.build("float16", seed=1)
    assert len(model.layers) == 3
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    assert attention.q_proj.weight.shape == (48, 24)
    assert attention.k_proj.weight.shape == (16, 24)
    assert mlp.up_proj.weight.shape == (40, 24)
    assert mlp.up_proj.weight.dtype == mx.float16
    same, other = shape.build("float16", 1), shape.build("float16", 2)
    assert mx.array_equal(same.layers[2].mlp.up_proj.weight, model.layers[2].mlp.up_proj.weight)
    assert not mx.array_equal(other.layers[2].mlp.up_proj.weight, mlp.up_proj.weight)
    with pytest.raises(ConfigError, match="dtype"):
        shape.build("int8")


def test_prose_is_cut_to_the_token() -> None:
    tokenizer = tiny_tokenizer()
    long = prose_tokens(tokenizer, 700)
    assert len(long) == 700
    assert prose_tokens(tokenizer, 50) == long[:50]
    assert prose_tokens(tokenizer, 50, seed=1) != long[:50]


def test_facts_of_a_model() -> None:
    facts = ModelFacts.of(tiny_llama(), "tiny")
    assert facts == ModelFacts.of(tiny_llama(), "tiny") != ModelFacts.of(tiny_llama(seed=1), "tiny")
    assert (facts.dtype, facts.synthetic) == ("float32", "")
    # As float64 they take twice the bytes.
    doubled = sum(weight.nbytes for weight in parameters_of(tiny_llama()).values())
    assert facts.weights_nbytes == doubled // 2


def test_a_device_names_no_host_and_no_path() -> None:
    device = Device.present()
    assert device.kind in ("cpu", "gpu") and device.name
    text = " ".join(map(str, dataclasses.astuple(device)))
    assert "/" not in text and platform.node() not in text.split()
