"""lm-evaluation-harness under eviction, against a stand-in of its few parts that mlx-lm uses."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx_lm
import numpy as np
import pytest

import kvkeep
from commands import fault_of
from evaluations import results_file
from kvkeep import EvictionConfig, compact_prompt_cache, copy_cache
from kvkeep.cli.main import main
from kvkeep.errors import ConfigError
from kvkeep.evaluation import HarnessRecord, evicting_lm, run_harness, variants_of
from kvkeep.evaluation.harness import answer_of
from oracles import logits_of, prefilled
from tiny_folder import write_tiny_folder

CONFIG = EvictionConfig(policy="snapkv", budget="25%")
CONTEXT = "In the beginning there was a long text about nothing at all. " * 5
CHOICES = (" yes", " no", " certainly not", "!")


class StandIn(ModuleType):
    """`lm_eval` with two tasks: one that chooses, one that generates."""

    def __init__(self) -> None:
        super().__init__("lm_eval")
        self.asked: list[Any] = []

    def simple_evaluate(self, model: Any, tasks: list[str], limit: int | None, **_: Any) -> Any:
        (task,) = tasks
        count = 3 if limit is None else min(limit, 3)
        self.asked.append((task, count, model))
        contexts = [f"{CONTEXT}{'why? ' * at}" for at in range(count)]
        if task == "choosing":
            requests = [request(text, choice) for text in contexts for choice in CHOICES]
            found = model.loglikelihood(requests)
            value = float(sum(score for score, _ in found))
        else:
            options = {"until": ["e"], "max_gen_toks": 9}
            found = model.generate_until([request(text, options) for text in contexts])
            value = float(sum(map(len, found)))
        results = {"acc,none": value, "acc_stderr,none": 0.5, "alias": task, "samples": 3}
        return {"results": {task: results}}


def request(*args: Any) -> Any:
    return SimpleNamespace(args=args)


@pytest.fixture
def lm_eval(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    modules: dict[str, Any] = {
        "lm_eval": stand_in,
        "lm_eval.api": ModuleType("lm_eval.api"),
        "lm_eval.api.model": SimpleNamespace(LM=object),
        "lm_eval.api.registry": SimpleNamespace(register_model=lambda name: lambda cls: cls),
        "lm_eval.tasks": SimpleNamespace(
            TaskManager=lambda include_path: SimpleNamespace(all_subtasks=["choosing", "writing"])
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "mlx_lm.evaluate", raising=False)
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.4.x" if name == "lm_eval" else real(name)
    )
    return stand_in


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def loaded(folder: str) -> tuple[Any, Any]:
    model, tokenizer = mlx_lm.load(folder)[:2]
    return model, tokenizer


@pytest.mark.parametrize("config", [None, CONFIG])
def test_choices_are_scored_over_the_compacted_context(
    lm_eval: StandIn, loaded: tuple[Any, Any], config: EvictionConfig | None
) -> None:
    lm = evicting_lm(*loaded, config)
    found = lm.loglikelihood([request(CONTEXT, choice) for choice in CHOICES])
    assert len(found) == len(CHOICES)
    model, tokens = lm._model, lm.tokenizer.encode(CONTEXT)
    cache = prefilled(model, tokens[:-1])
    if config is not None:
        cache = compact_prompt_cache(model, tokens[:-1], config=config).cache
    for (score, greedy), choice in zip(found, CHOICES, strict=True):
        more = lm.tokenizer.encode(choice)
        own = copy_cache(cache)
        rows = np.concatenate([logits_of(model, own, [t]) for t in [tokens[-1], *more[:-1]]])
        rows = rows.astype(np.float64)
        logprobs = rows - np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1, keepdims=True))
        logprobs -= rows.max(-1, keepdims=True)
        right = logprobs[np.arange(len(more)), more].sum()
        assert score == pytest.approx(right, abs=1e-4)
        assert bool(greedy) == (rows.argmax(-1) == more).all()


def test_generation_goes_on_from_the_compacted_context(
    lm_eval: StandIn, loaded: tuple[Any, Any]
) -> None:
    """In batches of two, with contexts of other lengths, down to a single token."""
    contexts = [CONTEXT, CONTEXT + "Why? ", CONTEXT * 2, "a"]
    for config in (CONFIG, None):
        lm = evicting_lm(*loaded, config, batch_size=2)
        found = lm.generate_until([request(text, {"max_gen_toks": 12}) for text in contexts])
        for text, ours in zip(contexts, found, strict=True):
            right = kvkeep.generate(
                lm._model,
                lm.tokenizer,
                lm.tokenizer.encode(text),
                config=config,
                max_tokens=12,
            )
            assert ours == right
        cut = lm.generate_until([request(CONTEXT, {"max_gen_toks": 12, "until": [found[0][3]]})])
        assert cut == [found[0][: found[0].index(found[0][3])]]


@pytest.mark.parametrize(
    ("text", "until", "thought", "right"),
    [
        ("one\n\ntwo", ["\n\n"], None, "one"),
        ("one two three", ["three", " two"], None, "one"),
        ("one", "e", None, "on"),
        ("one", [], None, "one"),
        ("one", [""], None, "one"),
        ("hm</think>one", ["x"], "</think>", "one"),
    ],
)
def test_answers_end_at_the_first_stop(
    text: str, until: Any, thought: str | None, right: str
) -> None:
    assert answer_of(text, until, thought) == right


def test_rolling_likelihoods_are_refused(lm_eval: StandIn, loaded: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="no prompt that could be evicted"):
        evicting_lm(*loaded, CONFIG).loglikelihood_rolling([request("a")])


def test_settings_are_evaluated_once_and_kept(
    lm_eval: StandIn, loaded: tuple[Any, Any], tmp_path: Path
) -> None:
    path, variants = tmp_path / "a.jsonl", variants_of(("snapkv", "random"), ("25%",))

    def evaluated(*tasks: str, limit: int | None = 2) -> list[HarnessRecord]:
        with results_file(path, loaded[0]) as file:
            found = run_harness(*loaded, tasks, variants, file, limit=limit)
        return [record for record in found if isinstance(record, HarnessRecord)]

    first = evaluated("choosing")
    assert [record.policy for record in first] == ["none", "snapkv", "random"]
    assert len({record.metrics["acc,none"] for record in first}) == 3
    assert all(set(record.metrics) == {"acc,none"} for record in first)
    assert (first[0].lm_eval, first[0].limit, first[0].shots) == ("0.4.x", 2, None)
    assert len(lm_eval.asked) == 3
    both = evaluated("choosing", "writing")
    assert both[:3] == first
    assert len(lm_eval.asked) == 6
    evaluated("writing", limit=None)
    assert len(lm_eval.asked) == 9
    with pytest.raises(ConfigError, match="knows no task 'writting'"):
        evaluated("writting")
    assert len(lm_eval.asked) == 9


def test_the_command_runs_harness_tasks(
    lm_eval: StandIn, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["eval", "--model", folder, "--lm-eval", "choosing", "--limit", "1"]
    argv += ["--policies", "snapkv", "--budgets", "25%", "--output", str(tmp_path / "a.jsonl")]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "choosing of lm-evaluation-harness 0.4.x" in out
    assert "examples: at most 1" in out
    assert "full cache" in out and "snapkv" in out and "acc" in out


def test_without_the_package_it_is_named(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    fault = fault_of(capsys, "eval", "--model", folder, "--lm-eval", "choosing")
    assert "need the package lm_eval" in fault
    assert "pip install 'kvkeep[lm-eval]'" in fault
