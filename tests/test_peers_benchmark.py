"""The benchmark beside peers: pairing, intervals, going on, and what the report owns up to."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evaluations import chat_tokenizer, evaluated, plan_of
from kvkeep import EvictionConfig, compact_prompt_cache
from kvkeep.caches.retain import held_rows
from kvkeep.evaluation import Questions, export_examples, variants_of
from kvkeep.evaluation.records import TaskRecord
from kvkeep.spec import Budget
from tiny_models import random_tokens, tiny_llama

FOLDER = Path(__file__).parents[1] / "benchmarks" / "peers"
MODULES = ("peer_plan", "peer_answers", "peer_judging", "peer_report", "kvkeep_side")
MODULES += ("velox_side", "peers")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(FOLDER))
    modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in MODULES}
    return SimpleNamespace(**modules)


def answer(peers: Any, text: str, *where: Any, rows: float = 10.0, held: int = 100) -> Any:
    return peers.peer_answers.Answer(*where, text, rows, held)


def prompt(peers: Any, task: str = "multi-key", index: int = 0, right: str = "481") -> Any:
    return peers.peer_answers.Prompt(task, index, "text", (1, 2, 3), 16, (right,), "all")


def scored(
    peers: Any, name: str, values: Sequence[float], budget: str = "25%", task: str = "t"
) -> dict[Any, Any]:
    """A side's answers to the prompts of one task, each with its score."""
    Scored = peers.peer_judging.Scored
    found = {}
    for index, value in enumerate(values):
        one = answer(peers, f"{value} of {name}", task, index, name, budget)
        found[one.key] = Scored(one, value)
    return found


# -- the plan ------------------------------------------------------------------------------


def test_every_setting_of_the_plan_is_one_of_kvkeeps(peers: Any) -> None:
    plan = peers.peer_plan
    keys: dict[str, str] = {}
    for planned in (*plan.PAIRS, *plan.OWN):
        variants = variants_of([planned.ours], plan.BUDGETS)
        assert len(variants) == 1 + len(plan.BUDGETS)
        keys[planned.name] = variants[1].setting.key
    assert len(keys) == len(plan.PAIRS) + len(plan.OWN)
    assert len(set(keys.values())) == len(keys)  # no two rows are the same run
    assert {own.against for own in plan.OWN} <= {"", *(pair.name for pair in plan.PAIRS)}
    assert {velox.against for velox in plan.VELOX} <= set(keys)


def test_both_sides_keep_as_many_rows(peers: Any) -> None:
    """But for a row where the share is a whole number that a float just misses."""
    plan = peers.peer_plan
    for budget in plan.BUDGETS:
        for length in range(1, 5000):
            ours = Budget.parse(budget).rows(length)
            assert plan.rows_of(budget, length) == ours
            theirs = max(1, int(length * (1 - plan.ratio_of(budget))))  # as kvpress counts
            assert theirs in (ours, ours - 1)


# -- prompts -------------------------------------------------------------------------------


def test_prompts_are_the_exports_own_text_and_ids(peers: Any, tmp_path: Path) -> None:
    tokenizer, export = chat_tokenizer(), tmp_path / "export.jsonl"
    questions = Questions(("needle-prose", "multi-key"), (1200,), 2, seed=5)
    export_examples(export, tokenizer, questions.examples(tokenizer), {"seed": 5})
    prompts = list(peers.kvkeep_side.prompts_of(export, tokenizer))
    path = tmp_path / "prompts.jsonl"
    peers.peer_answers.write_prompts(path, {"seed": 5}, iter(prompts))
    assert peers.peer_answers.read_prompts(path) == ({"seed": 5}, prompts)
    assert peers.peer_answers.read_prompts(path, 1)[1] == prompts[:2]
    assert [(p.task, p.index) for p in prompts] == [
        ("needle-prose", 0),
        ("multi-key", 0),
        ("needle-prose", 1),
        ("multi-key", 1),
    ]
    for one in prompts:
        assert one.ids == tuple(tokenizer.encode(one.text, add_special_tokens=False))
        assert one.answers and one.answers[0] in one.text


def test_several_turns_are_refused(peers: Any, tmp_path: Path) -> None:
    tokenizer, export = chat_tokenizer(), tmp_path / "export.jsonl"
    questions = Questions(("multi-turn",), (900,), 1)
    export_examples(export, tokenizer, questions.examples(tokenizer), {})
    with pytest.raises(ValueError):
        list(peers.kvkeep_side.prompts_of(export, tokenizer))


def test_other_token_ids_are_refused(peers: Any) -> None:
    one = prompt(peers)
    one.require_ids([1, 2, 3])
    with pytest.raises(ValueError, match="first difference at 1"):
        one.require_ids([1, 9, 3])
    with pytest.raises(ValueError, match=r"4 tokens here, 3 in kvkeep.*at 3"):
        one.require_ids([1, 2, 3, 4])


# -- answers files -------------------------------------------------------------------------


def test_a_run_goes_on_from_its_whole_lines(peers: Any, tmp_path: Path) -> None:
    AnswerFile, path, about = peers.peer_answers.AnswerFile, tmp_path / "new" / "a", {"side": "x"}
    first, second = (answer(peers, "481", "t", index, "snapkv", "25%") for index in (0, 1))
    AnswerFile(path, about).add(first)
    with path.open("a") as file:
        file.write('{"task": "t", "ind')  # the power went
    again = AnswerFile(path, about)
    assert first.key in again and second.key not in again
    again.add(second)
    assert peers.peer_answers.read(path) == (about, [first, second])


def test_a_file_of_another_run_is_refused(peers: Any, tmp_path: Path) -> None:
    AnswerFile = peers.peer_answers.AnswerFile
    AnswerFile(tmp_path / "a", {"kvpress": "0.5.5", "seed": 1})
    with pytest.raises(ValueError, match=r"another run \(seed differ"):
        AnswerFile(tmp_path / "a", {"kvpress": "0.5.5", "seed": 2})


@pytest.mark.parametrize("line", ["{}", "[1]", "nonsense", '{"task": "t", "more": 1}'])
def test_a_damaged_line_is_refused(peers: Any, tmp_path: Path, line: str) -> None:
    (tmp_path / "a").write_text(f"{{}}\n{line}\n")
    with pytest.raises(ValueError, match="damaged"):
        peers.peer_answers.read(tmp_path / "a")


def test_two_answers_of_one_prompt_are_refused(peers: Any, tmp_path: Path) -> None:
    line = json.dumps(dataclasses.asdict(answer(peers, "a", "t", 0, "snapkv", "25%")))
    (tmp_path / "a").write_text(f"{{}}\n{line}\n{line}\n")
    with pytest.raises(ValueError, match="two answers"):
        peers.peer_answers.read(tmp_path / "a")


def test_times_come_back(peers: Any, tmp_path: Path) -> None:
    timing = peers.peer_answers.Timing("snapkv", "25%", (1.0, 2.0), (0.1, 0.2))
    peers.peer_answers.write_timings(tmp_path / "t", {"threads": 2}, [timing])
    assert peers.peer_answers.read_timings(tmp_path / "t") == ({"threads": 2}, [timing])


# -- scores --------------------------------------------------------------------------------


def test_one_scorer_judges_all_sides(peers: Any) -> None:
    told = [
        answer(peers, "It is 481.", "multi-key", 0, "snapkv", "25%"),
        answer(peers, "It is 4815.", "multi-key", 1, "snapkv", "25%"),
        answer(peers, "It is 481.", "multi-key", 7, "snapkv", "25%"),  # of no prompt here
    ]
    found = peers.peer_judging.judged(told, [prompt(peers, index=0), prompt(peers, index=1)])
    assert [scored.score for scored in found.values()] == [1.0, 0.0]


def test_kvkeeps_answers_go_by_the_plans_names(
    peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pair, Own = peers.peer_plan.Pair, peers.peer_plan.Own
    pairs = (Pair("raw", "snapkv:window=8:sink_tokens=0:allocation=adaptive:alpha=0.2", "X()"),)
    monkeypatch.setattr(peers.peer_judging, "PAIRS", pairs)
    monkeypatch.setattr(peers.peer_judging, "OWN", (Own("shipped", "knorm"),))
    policies = [pairs[0].ours, "knorm", "random"]  # the last is in no plan
    records = evaluated(
        tmp_path / "r.jsonl", plan_of(["needle-prose"], policies=policies, budgets=("25%", "50%"))
    )
    found = peers.peer_judging.own_answers(tmp_path / "r.jsonl")
    assert sorted({one.key[2:] for one in found}) == [
        ("full cache", "100%"),
        ("raw", "25%"),
        ("raw", "50%"),
        ("shipped", "25%"),
        ("shipped", "50%"),
    ]
    answers = [record for record in records if isinstance(record, TaskRecord)]
    by_bytes = {record.kv_bytes for record in answers if record.policy in ("snapkv", "knorm")}
    assert {one.held_bytes for one in found if one.setting != "full cache"} == by_bytes


def test_a_difference_is_taken_on_the_prompts_of_both(peers: Any) -> None:
    ours = scored(peers, "snapkv", [1, 0, 1, 1]) | scored(peers, "snapkv", [0, 0], "50%")
    theirs = scored(peers, "snapkv", [0, 1, 1])
    d = peers.peer_judging.difference(ours, theirs, "snapkv", "snapkv", "25%", "t")
    assert (d.ours, d.theirs, d.mean) == (pytest.approx(2 / 3), pytest.approx(2 / 3), 0)
    assert (d.count, d.won, d.lost, d.same_text) == (3, 1, 1, 1)
    assert d.losses == ((1, "1 of snapkv", "0 of snapkv"),)
    assert d.low < 0 < d.high and d.verdict == "equal"
    other = peers.peer_judging.difference(ours, theirs, "snapkv", "snapkv", "25%", "other")
    assert other is None


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ([1, 1, 1, 1], [0, 0, 0, 0], "better"),
        ([0, 0, 0, 0], [1, 1, 1, 1], "worse"),
        ([0, 1, 1, 1], [1, 1, 1, 0], "equal"),
        ([0, 0, 1, 0], [1, 1, 0, 0], "lower, within noise"),
        ([1, 1, 0, 0], [0, 0, 1, 0], "higher, within noise"),
    ],
)
def test_the_verdict_is_the_intervals(
    peers: Any, ours: list[float], theirs: list[float], verdict: str
) -> None:
    both = scored(peers, "snapkv", ours), scored(peers, "snapkv", theirs)
    assert peers.peer_judging.difference(*both, "snapkv", "snapkv", "25%").verdict == verdict


def test_the_interval_is_the_means_own(peers: Any) -> None:
    """Of many values it is the normal interval; it is the same each time, and paired."""
    values = list(np.random.default_rng(3).choice([-1.0, 0.0, 0.0, 1.0], 2000))
    low, high = peers.peer_judging.bootstrap(values)
    spread = 1.96 * np.std(values) / np.sqrt(len(values))
    assert low == pytest.approx(np.mean(values) - spread, abs=0.003)
    assert high == pytest.approx(np.mean(values) + spread, abs=0.003)
    assert peers.peer_judging.bootstrap(values) == (low, high)
    assert peers.peer_judging.bootstrap([0.5]) == (0.5, 0.5)
    with pytest.raises(ValueError):
        peers.peer_judging.bootstrap([])


def test_noise_that_both_share_does_not_widen_the_interval(peers: Any) -> None:
    hard = [0.0, 1.0] * 50  # prompts differ, the sides do not, but for one
    theirs = [1.0, *hard[1:]]
    both = scored(peers, "snapkv", hard), scored(peers, "snapkv", theirs)
    d = peers.peer_judging.difference(*both, "snapkv", "snapkv", "25%")
    assert d.high - d.low < 0.05


def test_the_best_of_kvpress_is_the_mean_over_all_prompts(peers: Any) -> None:
    theirs = scored(peers, "snapkv", [1, 0]) | scored(peers, "kvzip", [1, 1])
    theirs |= scored(peers, "tova", [1, 1], "50%")
    assert peers.peer_judging.best_of(theirs, "25%") == [("kvzip", 1.0), ("snapkv", 0.5)]


def test_rows_come_back_and_are_compared(peers: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    one, other = prompt(peers, index=0), prompt(peers, index=1)
    key = peers.peer_answers.rows_key
    ours = {key(p, "snapkv", "25%"): rng.random((2, 3, 40)) < 0.5 for p in (one, other)}
    theirs = {name: kept.copy() for name, kept in ours.items()}
    theirs[key(one, "snapkv", "50%")] = np.ones((2, 3, 40), np.bool_)
    peers.peer_answers.write_rows(tmp_path / "new" / "rows.npz", ours)
    again = peers.peer_answers.read_rows(tmp_path / "new" / "rows.npz")
    same_rows = peers.peer_judging.same_rows
    assert same_rows(again, theirs, "snapkv", "25%") == 1.0
    assert same_rows(again, theirs, "snapkv", "50%") is None
    kept = theirs[key(one, "snapkv", "25%")]
    total = sum(np.count_nonzero(rows) for rows in ours.values())
    kept[tuple(np.argwhere(kept)[0])] = False
    assert same_rows(again, theirs, "snapkv", "25%") == (total - 1) / total


def test_kept_rows_of_every_store_are_told(peers: Any) -> None:
    model, tokens = tiny_llama(), random_tokens(200)
    for options in ({}, {"allocation": "adaptive"}, {"store": "union"}, {"store": "shared"}):
        config = EvictionConfig.parse({"policy": "snapkv", "window": 8, "budget": 40, **options})
        result = compact_prompt_cache(model, tokens, config=config)
        for layer in result.cache:
            kept = peers.kvkeep_side._kept(layer, 200)
            counts = [len(positions) for positions in held_rows(layer).positions]
            assert kept.sum(axis=1).tolist() == counts


class FakeCache:
    """Keeps `rows` of a prompt and appends each step's row; its buffer is of no concern."""

    def __init__(self, rows: int) -> None:
        self.held = rows

    def update_and_fetch(self, keys: np.ndarray, values: np.ndarray) -> Any:
        if keys.shape[2] > 1:
            return keys, values
        self.held += 1
        return (np.zeros((1, 2, self.held, 4), np.float16),) * 2


def test_rows_of_a_peer_are_those_of_its_first_step(peers: Any) -> None:
    cache = [FakeCache(5), FakeCache(7)]
    watched = peers.velox_side.Watched(cache)
    for length in (30, 1, 1):
        for layer in cache:
            layer.update_and_fetch(*(np.zeros((1, 2, length, 4), np.float16),) * 2)
    assert watched.rows == [5, 7]
    assert watched.nbytes == 2 * 2 * 4 * 2 * (5 + 7)


# -- the report ----------------------------------------------------------------------------


def report_of(peers: Any, ours: dict[Any, Any], theirs: dict[Any, Any], **more: Any) -> str:
    prompts = [prompt(peers, "t", index) for index in range(4)]
    told = {
        "date": "2026-01-02",
        "command": "make peers",
        "prompts": prompts,
        "header": {"seed": 9},
        "scores": {"kvkeep": ours, "kvpress": theirs},
        "versions": {"kvkeep": {"kvkeep": "1.2"}, "kvpress": {"kvpress": "0.5.5"}},
        **more,
    }
    return peers.peer_report.markdown(peers.peer_report.Report(**told))


def test_every_row_behind_is_named_with_what_was_said(peers: Any) -> None:
    full = scored(peers, "full cache", [1, 1, 1, 1], "100%")
    ours = full | scored(peers, "snapkv", [0, 0, 1, 1]) | scored(peers, "tova", [1, 1, 1, 1])
    ours |= scored(peers, "lookahead (recommended)", [1, 1, 1, 1])
    theirs = full | scored(peers, "snapkv", [1, 1, 1, 1]) | scored(peers, "tova", [0, 0, 0, 0])
    text = report_of(peers, ours, theirs)
    behind = text.split("## Every row where kvkeep is behind")[1].split("## Task by task")[0]
    assert "**snapkv**: 1 of 1 rows behind, 0 ahead" in behind
    assert "- t, 25%: 0.50 against 1.00" in behind
    assert "prompt 1: `1 of snapkv` · `0 of snapkv`" in behind
    assert "**tova**: 0 of 1 rows behind, 1 ahead" in behind
    assert "| tova | 25% | 1.00 | 0.00 | +1.00 (+1.00 to +1.00) | 4 : 0 | 0/4 |  | better |" in text
    assert "Same text as kvpress's on 4 of 4 prompts" in text
    for told in ("2026-01-02", "seed 9", "kvpress 0.5.5", "kvkeep 1.2", "make peers"):
        assert told in text


def test_the_count_of_rows_within_noise_leaves_out_the_worse(peers: Any) -> None:
    ours = scored(peers, "snapkv", [0, 0, 0, 0]) | scored(peers, "tova", [1, 0, 1, 1])
    theirs = scored(peers, "snapkv", [1, 1, 1, 1]) | scored(peers, "tova", [1, 1, 1, 1])
    text = report_of(peers, ours, theirs)
    assert "1 of 2 within noise of kvpress or better." in text
    assert "0.00 | 1.00 | -1.00 (-1.00 to -1.00) | 0 : 4 | 0/4 |  | worse |" in text


def test_the_recommended_setting_stands_against_the_best(peers: Any) -> None:
    ours = scored(peers, "lookahead (recommended)", [1, 1, 1, 0])
    ours |= scored(peers, "snapkv", [0, 0, 0, 0])
    theirs = scored(peers, "snapkv", [1, 0, 0, 0]) | scored(peers, "kvzip", [1, 1, 0, 0])
    text = report_of(peers, ours, theirs)
    best = text.split("against kvpress's best")[1].split("##")[0]
    lines = [line for line in best.splitlines() if line.startswith("| ")][2:]
    assert lines[0].startswith("| kvzip | 0.50 | +0.25 ")
    assert lines[1].startswith("| snapkv | 0.25 | +0.50 ")


def test_a_peer_that_does_not_run_is_told_with_its_error(peers: Any) -> None:
    ours = scored(peers, "snapkv", [1])
    text = report_of(peers, ours, {}, failed={"velox": "RuntimeError: no Metal here"})
    assert "It did not run here" in text and "no Metal here" in text


def test_answers_cannot_break_the_tables(peers: Any) -> None:
    quoted = peers.peer_report._quoted
    assert quoted("a | `b`\n\n c") == "`a / 'b' c`"
    assert quoted("") == "` `"
    assert len(quoted("x" * 500)) < 60


def test_times_stand_beside_bytes(peers: Any) -> None:
    timing = peers.peer_answers.Timing("snapkv", "25%", (1.0, 3.0, 2.0), (0.1, 0.2, 0.3))
    text = report_of(
        peers,
        scored(peers, "snapkv", [1]),
        {},
        times={"kvkeep": ({"blas": "MKL"}, [timing])},
    )
    expected = "| kvkeep | snapkv | 25% | 10 | 0.0 | 2.00 (1.00 – 3.00) | 200.0 (100.0 – 300.0) |"
    assert expected in text
    assert "blas MKL" in text


# -- the run -------------------------------------------------------------------------------


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize("together", [False, True])
def test_a_peers_failure_is_kept_and_kvkeeps_ends_the_run(
    peers: Any, tmp_path: Path, together: bool
) -> None:
    sides = {"kvkeep": python("pass"), "velox": python("raise RuntimeError('no Metal here')")}
    failed = peers.peers.run(sides, together, tmp_path)
    assert list(failed) == ["velox"] and "no Metal here" in failed["velox"]
    with pytest.raises(SystemExit, match="no room"):
        peers.peers.run({"kvkeep": python("raise SystemExit('no room')")}, together, tmp_path)


def test_at_once_means_a_thread_each(peers: Any, tmp_path: Path) -> None:
    code = "import os; assert os.environ.get('OMP_NUM_THREADS') == '1'"
    assert peers.peers.run({"kvkeep": python(code)}, True, tmp_path) == {}


def test_a_peer_without_an_environment_is_left_out(peers: Any, tmp_path: Path) -> None:
    options = peers.peers.parse(["--kvpress", "py", "--folder", str(tmp_path)])
    commands = peers.peers.commands(options, tmp_path)
    assert set(commands["answers"]) == set(commands["timings"]) == {"kvkeep", "kvpress"}
    eval_command = commands["answers"]["kvkeep"]
    assert eval_command[1:4] == ["-m", "kvkeep", "eval"]
    assert "12%,25%,50%" in eval_command
    assert commands["answers"]["kvpress"][0] == "py"


def test_sizes_out_of_range_are_refused(peers: Any) -> None:
    for flags in (["--prompts", "0"], ["--tokens", "20"]):
        with pytest.raises(SystemExit):
            peers.peers.parse(flags)
