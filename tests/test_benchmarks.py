"""The benchmarks run, in sizes that say nothing about speed, and report what they should."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
POLICIES = ("snapkv-d", "snapkv", "span")
NAMES = ("selection", "decode", "stores", "long-decode", "compaction", "memory")


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, str]:
    """The report, the Markdown tables and the terminal's text of one quick run of everything."""
    out = tmp_path_factory.mktemp("benchmarks") / "new" / "quick"
    command = [sys.executable, str(FOLDER / "run.py"), "--quick", "--random", "--out", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert sorted(path.name for path in out.parent.iterdir()) == ["quick.json", "quick.md"]
    report = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    return report, out.with_suffix(".md").read_text(encoding="utf-8"), run.stdout


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("results")


def test_one_command_runs_every_benchmark(quick: tuple[dict[str, Any], str, str]) -> None:
    report, tables, shown = quick
    assert tuple(report["benchmarks"]) == NAMES
    assert report["quick"] is True
    assert {"name", "cores", "mlx", "mlx_lm", "blas"} <= set(report["machine"])
    for benchmark in report["benchmarks"].values():
        assert benchmark["results"], "a benchmark without a result"
        assert len(benchmark["load"]) == 2
        for result in benchmark["results"]:
            assert result["subject"] in tables
            assert all(math.isfinite(value) for value in result["values"])
    assert "Quick run" in shown


def test_every_ratio_is_taken_within_a_round(quick: tuple[dict[str, Any], str, str]) -> None:
    for benchmark in quick[0]["benchmarks"].values():
        for result in benchmark["results"]:
            if result["baseline"] is None:
                continue
            assert len(result["values"]) == len(result["baseline_values"]) >= 2
            judged = result["spreads"]["judged"]
            order = [judged[k] for k in ("low", "median_low", "median", "median_high", "high")]
            assert order == sorted(order)


@pytest.mark.parametrize(
    ("name", "target", "subjects"),
    [
        ("decode", ">= 0.97", {"compact, shared", "compact, per head"}),
        ("stores", "<= 1.15", {"ragged", "ragged, duo"}),
        ("stores", "<= 1.05", {"ragged", "ragged, duo"}),
        ("compaction", "<= 0.03", {f"{p}: score + compact" for p in POLICIES}),
        ("memory", "<= 1.03", {f"{p}: peak" for p in POLICIES}),
        ("selection", ">= 50", {"snapkv_keep_indices, NumPy float32"}),
    ],
)
def test_what_is_judged_against_what_target(
    quick: tuple[dict[str, Any], str, str], name: str, target: str, subjects: set[str]
) -> None:
    found = quick[0]["benchmarks"][name]["results"]
    assert subjects <= {result["subject"] for result in found if result["target"] == target}


def test_the_bound_holds_no_more_rows_than_the_compact_cache(
    quick: tuple[dict[str, Any], str, str],
) -> None:
    found = quick[0]["benchmarks"]["memory"]["results"]
    left = [result for result in found if result["subject"].endswith("left afterwards")]
    assert left
    for result in left:  # a quarter of the rows stays, and the positions beside them
        assert 0.2 < result["spreads"]["judged"]["median"] < 0.45


def test_long_decode_counts_pythons_allocations(
    quick: tuple[dict[str, Any], str, str],
) -> None:
    found = quick[0]["benchmarks"]["long-decode"]["results"]
    kept = [result for result in found if result["subject"].endswith("kept per token")]
    assert {result["unit"] for result in kept} == {"B"}
    assert len(kept) == 3  # stock, shared, per head
    # The count itself is no timing: a table of positions rebuilt per token would show here.
    for result in found:
        if "bytes within a token" in result["subject"]:
            assert result["spreads"]["judged"]["median"] <= 1.1


def test_only_runs_what_is_asked_for(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "run.py"), "--quick", "--only", "selection"]
    run = subprocess.run(
        [*command, "--out", str(tmp_path / "one.json")], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    report = json.loads((tmp_path / "one.json").read_text(encoding="utf-8"))
    assert list(report["benchmarks"]) == ["selection"]


def test_an_unknown_name_is_refused() -> None:
    command = [sys.executable, str(FOLDER / "run.py"), "--only", "speed"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    assert "long-decode" in run.stderr


@pytest.mark.parametrize(
    ("ratio", "sense", "limit", "met"),
    [
        ("baseline / subject", "at least", 0.5, True),
        ("baseline / subject", "at least", 0.6, False),
        ("subject / baseline", "at most", 2.0, True),
        ("subject / baseline", "at most", 1.9, False),
    ],
)
def test_a_target_is_about_the_median_ratio(
    results: ModuleType, ratio: str, sense: str, limit: float, met: bool
) -> None:
    result = results.Result(
        "case",
        "new",
        [2.0, 4.0, 6.0],
        "s",
        "old",
        [1.0, 2.0, 30.0],
        ratio,
        results.Target(sense, limit),
    )
    assert result.met is met
    assert ("MISSED" in results.cells(result)[-1]) is not met
