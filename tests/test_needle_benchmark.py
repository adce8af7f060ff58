"""The needle benchmark: what counts as an answer, what is asked, and that a run can go on."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bare_models import cache_bytes
from kvkeep import EvictionConfig, compact_prompt_cache
from kvkeep.haystack import needle_prompt
from oracles import greedy
from tiny_models import VOCAB, random_tokens, tiny_llama

FOLDER = Path(__file__).parents[1] / "benchmarks"


class Letters:
    """A character per token, and a chat template around the message."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % VOCAB for letter in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options == {"add_generation_prompt": True, "tokenize": False}
        return f"<user>{messages[0]['content']}<assistant>"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("needles", "needle_tasks", "needle_answers")
    modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in names}
    return SimpleNamespace(**modules)


CONFIGS = (
    ("snapkv", {"window": 8}),
    ("span", {"allocation": "adaptive"}),
    ("snapkv-d", {}),
    ("knorm", {}),
    ("criticalkv", {}),
    ("kvzip", {"allocation": "global"}),
    ("observed_attention", {}),
)


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("seed", range(4))
def test_one_forward_judges_as_greedy_decoding_does(benchmark: Any, seed: int) -> None:
    answers, Asked = benchmark.needle_answers.answers, benchmark.needle_answers.Asked
    model, tokens = tiny_llama(seed=seed), random_tokens(200, seed)
    config = EvictionConfig(policy="snapkv", budget=40)

    def cache() -> list[Any]:
        return compact_prompt_cache(model, tokens[:-3], config=config).cache

    stepped = cache()
    for token in tokens[-3:-1]:
        greedy(model, stepped, token, 1)
    right = greedy(model, stepped, tokens[-1], 6)[0]
    assert answers(model, cache(), Asked(tokens[:-3], tokens[-3:], right))
    for place in range(6):
        wrong = list(right)
        wrong[place] = (wrong[place] + 1) % VOCAB
        assert not answers(model, cache(), Asked(tokens[:-3], tokens[-3:], wrong))


def test_the_evicted_copy_is_what_compaction_keeps(benchmark: Any) -> None:
    """A prefill with a wider window serves every policy, and stays as it was."""
    model, tokens = tiny_llama(), random_tokens(200)
    read = benchmark.needle_answers.read(model, tokens, window=64, step=64)
    for policy, options in CONFIGS:
        for budget in ("25%", "50%"):  # the second is chosen from the scores of the first
            config = EvictionConfig.parse({"policy": policy, "budget": budget, **options})
            if budget == "25%" and (own := benchmark.needle_answers.own_reading(config)):
                read = benchmark.needle_answers.read(model, tokens, window=64, step=64, policy=own)
            ours = benchmark.needle_answers.evicted(read, config)
            right = compact_prompt_cache(model, tokens, config=config, prefill_step_size=64).cache
            for mine, other in zip(ours, right, strict=True):
                assert cache_bytes([mine]) == cache_bytes([other])
            assert all(layer.size() == 200 for layer in read.cache)


def test_the_question_lies_inside_what_is_evicted_or_after_it(benchmark: Any) -> None:
    asked, letters = benchmark.needle_answers.asked, Letters()
    prompt = needle_prompt(words, 60, seed=1)
    text = f"<user>{prompt.prompt}<assistant>"
    for question in ("inside", "after"):
        tokens = asked(letters, prompt, question=question)
        whole = [*tokens.context, *tokens.given, *tokens.answer]
        assert whole == letters.encode(text + prompt.answered)
        assert tokens.answer == letters.encode(prompt.answer)
        length = len(text) - 1 if question == "inside" else len("<user>" + prompt.document)
        assert len(tokens.context) == length


def test_the_sets_share_neither_text_nor_seeds(benchmark: Any) -> None:
    choose, report = benchmark.needle_tasks.CHOOSE, benchmark.needle_tasks.REPORT
    assert len({str(task) for task in report.tasks} - {str(task) for task in choose.tasks}) >= 2
    assert len(set(map(str, report.tasks))) == len(report.tasks)
    assert not {t.tail for t in report.tasks if t.tail} & {t.tail for t in choose.tasks}
    task = next(task for task in choose.tasks if task.haystack == "prose")
    made = {s.name: list(s.prompts(task, 4, 300, words)) for s in (choose, report)}
    seeds = [{prompt.seed for prompt in prompts} for prompts in made.values()]
    assert not seeds[0] & seeds[1]
    answers = [{prompt.answer for prompt in prompts} for prompts in made.values()]
    assert not answers[0] & answers[1]
    texts = [
        {p for prompt in prompts for p in prompt.document.split("\n\n") if "pass code" not in p}
        for prompts in made.values()
    ]
    assert not texts[0] & texts[1]


def run(benchmark: Any, out: Path, *more: str) -> list[dict[str, Any]]:
    arguments = ["--set", "choose", "--prompts", "1", "--tokens", "900", "--budget", "25%", "50%"]
    only = ["--only", "snapkv", "knorm", "--out", str(out)]
    assert benchmark.needles.main([*arguments, *only, *more]) == 0
    return [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]


def test_a_run_goes_on_where_it_stopped(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark.needles, "load_model", lambda: (tiny_llama(), Letters()))
    read, calls = benchmark.needle_answers.read, []

    def counted(*arguments: Any, **more: Any) -> Any:
        calls.append(arguments)
        return read(*arguments, **more)

    monkeypatch.setattr(benchmark.needle_answers, "read", counted)
    out = tmp_path / "new" / "needles"
    about, *lines = run(benchmark, out)
    prompts = len(benchmark.needle_tasks.CHOOSE.tasks)
    assert about["set"] == "choose"
    assert {"model sha256", "mlx", "mlx-lm", "kvkeep", "prompts per task"} <= set(about)
    assert len(calls) == prompts
    assert len(lines) == prompts * (1 + 2 * 8)  # the full cache, two budgets of eight settings
    assert sorted(path.name for path in out.parent.iterdir()) == ["needles.jsonl", "needles.md"]

    record = out.with_suffix(".jsonl")
    kept = record.read_text().splitlines()[: -2 * 17]
    record.write_text("\n".join(kept) + "\n")
    assert run(benchmark, out) == [about, *lines]
    assert len(calls) == prompts + 2  # what was cut off, and no more
    with pytest.raises(SystemExit, match="another run"):
        run(benchmark, out, "--question", "after")


def test_the_table_counts_exact_answers(benchmark: Any) -> None:
    tasks = [benchmark.needle_tasks.Task("prose", "number"), benchmark.needle_tasks.Task("a", "b")]
    lines = [
        {"task": task, "setting": name, "budget": budget, "right": right}
        for task, name, budget, right in (
            ("prose, number", "full cache", "", True),
            ("a, b", "full cache", "", False),
            ("prose, number", "good", "25%", True),
            ("prose, number", "bad", "25%", False),
            ("a, b", "good", "25%", True),
            ("a, b", "bad", "25%", True),
            ("a, b", "bad", "12%", True),
        )
    ]
    text = benchmark.needles.markdown({"set": "x"}, tasks, lines)
    rows = [line for line in text.splitlines() if line.startswith(("|", "##"))]
    assert rows == [
        "## 12% of the rows",
        "| setting | all | prose, number | a, b |",
        "| --- | --- | --- | --- |",
        "| full cache | 1/2 | 1/1 | 0/1 |",
        "| bad | 1/1 |  | 1/1 |",
        "## 25% of the rows",
        "| setting | all | prose, number | a, b |",
        "| --- | --- | --- | --- |",
        "| full cache | 1/2 | 1/1 | 0/1 |",
        "| good | 2/2 | 1/1 | 1/1 |",
        "| bad | 1/2 | 0/1 | 1/1 |",
    ]
