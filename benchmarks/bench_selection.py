"""Choosing rows among many scores, against a plain Python sort of the same rule.

    python benchmarks/bench_selection.py

Runs are interleaved, so that a busy moment of the machine meets each contender; the table
shows medians, the spread of the runs and the ratio to the plain sort. The results are compared
in every round: a difference ends the benchmark with an error.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from kvkeep.selection import snapkv_keep_indices

Contender = Callable[[], tuple[int, ...]]
BASE = "plain sort by (score, position)"


def plain_sort(scores: list[float], budget: int, ranked: Callable[[range], list[int]]) -> tuple:
    """SnapKV-D's rule with the defaults, `ranked` giving the others from worst to best."""
    sinks, recent = min(4, budget), max(1, budget // 8)
    recent = min(recent, budget - sinks)
    others = range(sinks, len(scores) - recent)
    best = ranked(others)[len(others) - (budget - sinks - recent) :]
    last = range(len(scores) - recent, len(scores))
    return tuple(sorted([*range(sinks), *best, *last]))


def contenders(array: np.ndarray, scores: list[float], budget: int) -> dict[str, Contender]:
    """Every way to choose, over the same scores; the sorts get the list, which is faster there."""
    length = len(array)

    def by_pair(others: range) -> list[int]:
        return sorted(others, key=lambda position: (scores[position], position))

    def by_score(others: range) -> list[int]:
        return sorted(others, key=scores.__getitem__)  # stable: a tie leaves the later one last

    return {
        BASE: lambda: plain_sort(scores, budget, by_pair),
        "stable sort by score alone": lambda: plain_sort(scores, budget, by_score),
        "snapkv_keep_indices, Python list": lambda: snapkv_keep_indices(length, budget, scores),
        "snapkv_keep_indices, NumPy float32": lambda: snapkv_keep_indices(length, budget, array),
    }


def measure(choose: dict[str, Contender], budget: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per run and contender, one run each per round."""
    seconds: dict[str, list[float]] = {name: [] for name in choose}
    for round_number in range(rounds + 1):
        kept = {}
        for name, run in choose.items():
            started = time.perf_counter()
            kept[name] = run()
            elapsed = time.perf_counter() - started
            if round_number:  # the first round warms up
                seconds[name].append(elapsed)
        different = [name for name in kept if kept[name] != kept[BASE]]
        if different or len(kept[BASE]) != budget:
            sys.exit(f"budget {budget}: other rows than the sort: {different}")
    return seconds


def report(length: int, budget: int, seconds: dict[str, list[float]]) -> None:
    rounds = len(seconds[BASE])
    print(f"\n{length:,} scores, budget {budget:,}, {rounds} interleaved runs, results equal")
    print(f"{'':36}{'median ms':>11}{'min - max ms':>22}{'x faster (min - max)':>28}")
    for name, runs in seconds.items():
        spread = f"{1e3 * min(runs):.2f} - {1e3 * max(runs):.2f}"
        ratios = [base / run for base, run in zip(seconds[BASE], runs, strict=True)]
        ratio = f"{statistics.median(ratios):.1f} ({min(ratios):.1f} - {max(ratios):.1f})"
        print(f"{name:36}{1e3 * statistics.median(runs):11.2f}{spread:>22}{ratio:>28}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the choice of rows among many scores.")
    parser.add_argument("--scores", type=int, default=1_000_000, help="positions to choose from")
    parser.add_argument(
        "--budget", type=int, nargs="+", default=[512, 2048, 250_000], help="rows to keep"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured runs of each contender")
    options = parser.parse_args()
    if options.scores <= 128:
        parser.error("--scores must be more than 128: shorter prompts are kept whole")
    if not all(1 <= budget < options.scores for budget in options.budget):
        parser.error("--budget must be at least 1 and less than --scores")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.machine()}")
    array = np.random.default_rng(0).random(options.scores, dtype=np.float32)
    scores: list[float] = array.tolist()
    for budget in options.budget:
        seconds = measure(contenders(array, scores, budget), budget, options.rounds)
        report(options.scores, budget, seconds)


if __name__ == "__main__":
    main()
