"""Evaluation runs: each setting's numbers are those it has by itself, and a run can go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvkeep
from bare_models import cache_bytes
from evaluations import POLICIES, chat_tokenizer, evaluated, model, numbers, plan_of, results_file
from kvkeep import compact_prompt_cache, copy_cache
from kvkeep.compaction import prefill_and_compact
from kvkeep.errors import ConfigError, HeadProfileError
from kvkeep.evaluation import (
    Plan,
    Questions,
    TaskRecord,
    Variant,
    evicted,
    fitted,
    read,
    render,
    run_tasks,
    score,
    setting_of,
    task_of,
    tokenize,
    variants_of,
)
from kvkeep.evaluation import running as running_module
from kvkeep.evaluation.running import repeats
from kvkeep.generation import repeat_prompt
from kvkeep.spec import EvictionConfig
from oracles import greedy, prefilled
from tiny_models import random_tokens, tiny_bare_model, tiny_llama, tiny_tokenizer


def test_one_reading_serves_every_policy() -> None:
    """Caches bit for bit as each policy's own prefill and compaction leave them."""
    tokens = random_tokens(300)
    variants = variants_of(POLICIES, ("25%", "50%"))
    configs = [variant.config for variant in variants if variant.config is not None]
    assert len(configs) == 2 * len(POLICIES)
    repeat = repeats(tiny_tokenizer(), variants)
    reading = read(model(), tokens, configs, step=64, repeat=repeat)
    before = cache_bytes(reading.cache)
    for config in configs:
        ours = evicted(reading, config)
        right = prefill_and_compact(
            model(),
            tokens,
            make_prompt_cache(model()),
            config,
            step=64,
            repeat_prompt=repeat_prompt(tiny_tokenizer(), config),
        )
        assert cache_bytes(ours.cache) == cache_bytes(right.cache), config.policy
        assert ours.retained_tokens == right.retained_tokens
        assert ours.compact_cache_nbytes == right.compact_cache_nbytes < ours.exact_cache_nbytes
    assert cache_bytes(reading.cache) == before


def test_what_is_written_to_a_copy_is_not_seen_in_the_reading() -> None:
    sliding = tiny_llama(layers=3, sliding_layers=[1])
    tokens = random_tokens(200)
    config = EvictionConfig(policy="snapkv", budget="25%")
    reading = read(sliding, tokens, [config])
    before = cache_bytes(reading.cache)
    for chosen in (config, None):
        copied = evicted(reading, chosen).cache
        greedy(sliding, copied, 1, 5)
    assert cache_bytes(reading.cache) == before


@pytest.mark.parametrize("task", ["needle-prose", "instruction-first"])
def test_aware_settings_answer_as_generation_does(tmp_path: Path, task: str) -> None:
    plan = plan_of([task], policies=POLICIES, budgets=("30%",), lengths=(600,))
    records = evaluated(tmp_path / "a.jsonl", plan)
    assert len(records) == len(plan.variants) == plan.count
    example = fitted(chat_tokenizer(), task_of(task), 0, length=600)
    (prompt,) = tokenize(chat_tokenizer(), render(chat_tokenizer(), example)).prompts
    for record, variant in zip(records, plan.variants, strict=True):
        assert isinstance(record, TaskRecord)
        right = kvkeep.generate(
            model(),
            chat_tokenizer(),
            list(prompt),
            config=variant.config,
            max_tokens=example.max_tokens,
        )
        assert record.answers == (right,), variant.setting.name
        assert record.setting == variant.setting == setting_of(variant.config)
        assert record.compressed_tokens == len(prompt) - 1 == record.prompt_tokens - 1
        assert record.expected == (example.turns[0].answers,)
        assert record.score == score(right, example.turns[0].answers, "all")
    texts = {record.answers for record in records if isinstance(record, TaskRecord)}
    assert len(texts) > 3  # eviction does change what this model says


def test_agnostic_settings_read_the_question_over_the_compact_document(tmp_path: Path) -> None:
    plan = plan_of(["needle-prose"], policies=POLICIES[:4], protocols=("agnostic",))
    records = evaluated(tmp_path / "a.jsonl", plan)
    example = fitted(chat_tokenizer(), task_of("needle-prose"), 0, length=900)
    tokens = tokenize(chat_tokenizer(), render(chat_tokenizer(), example))
    document = tokens.prompts[0][: tokens.context]
    for record, variant in zip(records, plan.variants, strict=True):
        assert isinstance(record, TaskRecord)
        assert record.compressed_tokens == len(document) < record.prompt_tokens
        cache = prefilled(model(), document)
        if variant.config is not None:
            cache = compact_prompt_cache(model(), document, config=variant.config).cache
        right = kvkeep.generate(
            model(),
            chat_tokenizer(),
            list(tokens.prompts[0][tokens.context :]),
            config=None,
            prompt_cache=cache,
            max_tokens=example.max_tokens,
        )
        assert record.answers == (right,)


@pytest.mark.parametrize("protocol", ["aware", "agnostic"])
def test_later_turns_are_asked_over_the_cache_of_the_first(tmp_path: Path, protocol: str) -> None:
    plan = plan_of(["multi-turn"], protocols=(protocol,), lengths=(1000,))
    records = evaluated(tmp_path / "a.jsonl", plan)
    example = fitted(chat_tokenizer(), task_of("multi-turn"), 0, length=1000)
    tokens = tokenize(chat_tokenizer(), render(chat_tokenizer(), example))
    cut = len(tokens.prompts[0]) - 1 if protocol == "aware" else tokens.context
    for record, variant in zip(records, plan.variants, strict=True):
        assert isinstance(record, TaskRecord)
        cache = prefilled(model(), tokens.prompts[0][:cut])
        if variant.config is not None:
            cache = compact_prompt_cache(
                model(), tokens.prompts[0][:cut], config=variant.config
            ).cache
        said, held = [], cut
        for prompt in tokens.prompts:
            for token in prompt[held:-1]:  # one by one, as no chunk does it
                greedy(model(), cache, token, 1)
            held = len(prompt) - 1
            found, _ = greedy(model(), copy_cache(cache), prompt[-1], example.max_tokens)
            said.append(chat_tokenizer().decode(found))
        assert record.answers == tuple(said)
        assert len(record.turn_scores) == 3
        assert record.score == pytest.approx(sum(record.turn_scores) / 3)


def test_each_prompt_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    plan = plan_of(policies=("snapkv", "random", "observed_attention"), budgets=("25%", "50%"))
    evaluated(tmp_path / "a.jsonl", plan)
    assert len(calls) == plan.questions.count
    both = plan_of(protocols=("aware", "agnostic"))
    evaluated(tmp_path / "b.jsonl", both)
    assert len(calls) == 3 * plan.questions.count


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the prompts that are read from now on."""
    real, lengths = running_module.read, []

    def counting(the_model: Any, tokens: Any, *rest: Any, **more: Any) -> Any:
        lengths.append(len(tokens))
        return real(the_model, tokens, *rest, **more)

    monkeypatch.setattr(running_module, "read", counting)
    return lengths


def test_the_same_seed_gives_the_same_numbers(tmp_path: Path) -> None:
    first, second, other = (
        evaluated(tmp_path / name, plan_of(seed=seed))
        for name, seed in (("a.jsonl", 1), ("b.jsonl", 1), ("c.jsonl", 2))
    )
    assert numbers(first) == numbers(second)
    assert numbers(first) != numbers(other)


@pytest.mark.parametrize("cut", [0.15, 0.5, 0.9])
def test_a_run_that_was_cut_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: float
) -> None:
    plan = plan_of(limit=2)
    whole, path = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    right = evaluated(whole, plan)
    data = whole.read_bytes()
    header = data.index(b"\n") + 1
    path.write_bytes(data[: header + int(cut * (len(data) - header))])
    there = path.read_bytes().count(b"\n") - 1
    calls, reports = counted(monkeypatch), []
    ours = evaluated(path, plan, progress=lambda *told: reports.append(told))
    assert numbers(ours) == numbers(right)
    assert [reports[0][:2], reports[-1][:2]] == [(there, plan.count), (plan.count, plan.count)]
    assert len(calls) == -(-(len(right) - there) // len(plan.variants))
    kept = data[:header] + b"\n".join(data[header:].split(b"\n")[:there])
    assert path.read_bytes().startswith(kept)
    assert evaluated(path, plan) == ours
    assert len(calls) <= len(right) // len(plan.variants)  # nothing was read again


def test_an_interruption_loses_nothing_that_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, path = plan_of(limit=2), tmp_path / "a.jsonl"
    real, calls = running_module.answers, []

    def interrupted(*arguments: Any, **more: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(*arguments, **more)

    monkeypatch.setattr(running_module, "answers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluated(path, plan)
    assert path.read_bytes().count(b"\n") == 1 + 4
    assert numbers(evaluated(path, plan)) == numbers(evaluated(tmp_path / "b.jsonl", plan))


def test_more_of_everything_is_added_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    first = evaluated(path, plan_of())
    more = plan_of(limit=2, policies=("snapkv", "random"), budgets=("25%", "50%"))
    second = evaluated(path, more)
    assert {record.key for record in first} - {record.key for record in second}  # knorm
    assert len(second) == more.count
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + len({record.key for record in (*first, *second)})
    assert numbers(second) != numbers(first)
    fresh = evaluated(tmp_path / "b.jsonl", more)
    by_key = {record.key: record for record in numbers(fresh)}
    assert all(by_key[record.key] == record for record in numbers(second))


def test_records_come_in_the_order_that_was_asked_for(tmp_path: Path) -> None:
    """Whatever the file had before."""
    later = plan_of(["needle-prose"], policies=("knorm", "random:seed=3"), budgets=("30%",))
    first = plan_of(["needle-prose"], policies=("random:seed=3",), budgets=("30%",))
    evaluated(tmp_path / "a.jsonl", first)
    records = evaluated(tmp_path / "a.jsonl", later)
    found = [record.setting.policy for record in records if isinstance(record, TaskRecord)]
    assert found[:3] == ["none", "knorm", "random"]


def test_records_are_flat_and_typed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    (*_, record) = evaluated(path, plan_of(["multi-query"], policies=["snapkv:window=9"]))
    header, *lines = map(json.loads, path.read_text().splitlines())
    assert header["schema"] == "kvkeep eval results"
    assert header["tasks"]["multi-query"] == task_of("multi-query").version
    assert header["dtype"] == "float32"
    assert header["model"].startswith("llama:")
    assert lines[-1]["options"] == {"window": 9} == dict(record.options)
    assert set(lines[-1]["seconds"]) == {"prefill", "score", "compact", "decode"}
    assert 0 < lines[-1]["rows"] < lines[-1]["compressed_tokens"]


def test_settings_are_told_apart_and_read_from_text() -> None:
    full, *others = variants_of(
        ("snapkv", "snapkv:window=32:pool-kernel=5", "none"), ("25%", "64"), ("uniform", "adaptive")
    )
    assert full == Variant(setting_of(None)) and full.config is None
    assert len({variant.setting.key for variant in others}) == len(others) == 8
    names = [variant.setting.name for variant in others]
    assert names[0] == "snapkv"
    assert "snapkv, adaptive, pool_kernel=5 window=32" in names
    (_, one) = variants_of(("snapkv:allocation=adaptive", "snapkv:allocation=adaptive"), ("0.5",))
    assert one.config == EvictionConfig(policy="snapkv", allocation="adaptive", budget=0.5)
    assert one.setting.budget == "50%"


@pytest.mark.parametrize(
    ("policies", "budgets", "more", "message"),
    [
        (["snap"], ["25%"], {}, "unknown eviction policy 'snap'.*'snapkv'"),
        (["snapkv:window"], ["25%"], {}, "unreadable policy"),
        (["snapkv:budget=3"], ["25%"], {}, "unreadable policy"),
        (["snapkv:wimdow=3"], ["25%"], {}, "unknown eviction setting"),
        (["knorm:window=3"], ["25%"], {}, "has no option 'window'"),
        (["snapkv"], ["120%"], {}, "budget share out of range"),
        (["snapkv"], ["25%"], {"stores": ["shared"], "allocations": ["adaptive"]}, "unequal"),
        (["snapkv"], ["25%"], {"allocations": ["even"]}, "unknown allocation"),
    ],
)
def test_settings_without_a_meaning_are_refused(
    policies: list[str], budgets: list[str], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        variants_of(policies, budgets, **more)


def test_plans_without_a_meaning_are_refused() -> None:
    for protocols in (("blind",), ()):
        with pytest.raises(ConfigError):
            Plan(Questions(), variants_of(["snapkv"], ["25%"]), protocols)


def test_a_profile_of_another_model_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = Path(__file__).parents[1] / "docs/results/heads/demo-optimise.json"
    calls = counted(monkeypatch)
    plan = plan_of(policies=[f"sink_recent:allocation=duo:head_profile={profile}"])
    with pytest.raises(HeadProfileError, match="of another model"):
        evaluated(tmp_path / "a.jsonl", plan)
    assert calls == []
    assert "demo-optimise.json@" in plan.variants[1].setting.told
    assert str(profile.parent) not in plan.variants[1].setting.told


def test_a_model_whose_queries_are_unseen_is_evaluated_where_none_are_needed(
    tmp_path: Path,
) -> None:
    bare = tiny_bare_model()
    for policies in (["knorm", "sink_recent"], ["snapkv-d", "random"]):
        plan = plan_of(["needle-prose"], policies=policies)
        with results_file(tmp_path / f"{policies[0]}.jsonl", bare) as file:
            records = run_tasks(bare, chat_tokenizer(), plan, file)
        assert [record.policy for record in records] == ["none", *policies]
