"""All benchmarks with one command: ratios with their spread.

    python benchmarks/run.py [--quick] [--only NAME ...] [--random] [--out PATH]

Contenders run interleaved; a figure is a median with its smallest and largest value, and
each ratio is taken within a round. PATH.json gets every figure, PATH.md the tables.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results
from rich.console import Console

#: Name and title; "long-decode" lies in bench_long_decode.py. Short ones first.
BENCHMARKS = {
    "selection": "Choosing rows among a million scores, against a plain sort",
    "decode": "Decode step on a compact cache, against a stock cache of as many rows",
    "stores": "Heads of unequal lengths, against equal ones of the same total",
    "long-decode": "A long answer on a compact cache: last tokens against first ones",
    "compaction": "Scoring and compaction, against the prefill",
    "memory": "Peak memory of prefill and compaction, against the prefill alone",
}

WIDTH = 160  # of tables that go to a file or a pipe


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmarks asked for; 1 where a target was missed, else 0."""
    options = parse(arguments)
    import kvkeep  # noqa: F401  # a fast BLAS only counts if it comes before mlx

    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    machine = results.machine()
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()))
    report: dict[str, Any] = {"machine": machine, "quick": options.quick, "benchmarks": {}}
    tables, missed = [], 0
    for name in options.only or BENCHMARKS:
        title, start, load = BENCHMARKS[name], time.perf_counter(), os.getloadavg()[0]
        with console.status(title):
            found = benchmark(name)(options.quick, options.random)
        elapsed, after = time.perf_counter() - start, os.getloadavg()[0]
        title += f" ({elapsed:.0f} s; load of the machine {load:.1f} before, {after:.1f} after)"
        console.rule(title, align="left")
        console.print(*results.tables(found), *results.notes(found), sep="\n")
        tables.append(results.markdown(title, found))
        missed += sum(result.met is False for result in found)
        report["benchmarks"][name] = {
            "seconds": elapsed,
            "load": [load, after],
            "results": [result.as_json() for result in found],
        }
    if options.out is not None:
        data, text = results.write_all(options.out, report, tables)
        console.print(f"Wrote {data} and {text}.")
    if options.quick:
        console.print("Quick run: sizes too small to say anything about speed.")
        return 0
    return int(missed > 0)


def benchmark(name: str) -> Callable[[bool, bool], list[results.Result]]:
    """What runs a benchmark, given whether to be quick and whether to use random weights.

    Its module is imported only now, so that a single benchmark starts at once.
    """
    if name == "selection":
        return lambda quick, random: selection(quick)

    def run(quick: bool, random: bool) -> list[results.Result]:
        from workloads import Options

        module = importlib.import_module(f"bench_{name.replace('-', '_')}")
        return module.run(Options(quick=quick, random=random))

    return run


def selection(quick: bool) -> list[results.Result]:
    """`bench_selection`, which also runs on its own, in this command's terms."""
    import bench_selection
    import numpy as np

    length, budgets, rounds = (2000, (64,), 2) if quick else (1_000_000, (512, 2048, 250_000), 7)
    array = np.random.default_rng(0).random(length, dtype=np.float32)
    scores, found = array.tolist(), []
    for budget in budgets:
        choose = bench_selection.contenders(array, scores, budget)
        runs = bench_selection.measure(choose, budget, rounds)
        base = [1e3 * seconds for seconds in runs[bench_selection.BASE]]
        for name, times in runs.items():
            if name == bench_selection.BASE:
                continue
            target = results.Target("at least", 50) if name.endswith("NumPy float32") else None
            case = f"{length:,} scores, budget {budget:,}"
            mine = [1e3 * seconds for seconds in times]
            found.append(
                results.Result(case, name, mine, "ms", bench_selection.BASE, base, target=target)
            )
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command's flags."""
    parser = argparse.ArgumentParser(description="Run kvkeep's benchmarks.")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that all runs")
    parser.add_argument(
        "--only",
        action="append",
        choices=list(BENCHMARKS),
        metavar="NAME",
        help=f"run this one (may be repeated): {', '.join(BENCHMARKS)}",
    )
    parser.add_argument(
        "--random",
        action="store_true",
        help="random weights in the demo model's shape: nothing to fetch, the same times",
    )
    parser.add_argument("--out", type=Path, help="write PATH.json and PATH.md")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
