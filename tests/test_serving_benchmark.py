"""The server benchmark: what a rate is, and that all three contenders answer."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tiny_folder import write_tiny_folder
from tiny_models import random_tokens, tiny_llama

pytest.importorskip("openai", reason="OpenAI's client comes with the extra dev")
FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("serving") / "model", endless=True))


@pytest.fixture
def modules() -> Iterator[tuple[ModuleType, ModuleType]]:
    """`benchmarks/serving.py` (its name is that of a helper of the tests) and its servers."""
    own = sys.modules.pop("serving", None)
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("serving"), importlib.import_module("server_processes")
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("serving", None)
        if own is not None:
            sys.modules["serving"] = own


@pytest.fixture
def benchmark(modules: tuple[ModuleType, ModuleType]) -> Any:
    return modules[0]


def test_a_rate_counts_what_came_while_all_decoded(benchmark: Any) -> None:
    streams = [
        benchmark.Stream((0.0, 1.0, 2.0, 3.0, 4.0), 5),
        benchmark.Stream((2.0, 3.0, 4.0, 5.0, 6.0), 5),
    ]
    assert benchmark.rate(streams) == 2 * 2 / 2  # from 2 to 4, two tokens of each
    assert benchmark.rate(streams[:1]) == 4 / 4
    # Half as many pieces as tokens: each piece is two of them.
    assert benchmark.rate([benchmark.Stream((0.0, 1.0, 2.0), 6)]) == 2 * 2 / 2


def test_streams_that_never_decoded_together_have_no_rate(benchmark: Any) -> None:
    apart = [benchmark.Stream((0.0, 1.0), 2), benchmark.Stream((1.0, 2.0), 2)]
    with pytest.raises(SystemExit, match="never decoded together"):
        benchmark.rate(apart)


def test_the_bound_answers_every_prompt(benchmark: Any) -> None:
    prompts = [random_tokens(20 + i, seed=i) for i in range(3)]
    streams = benchmark.generated(tiny_llama(), prompts, 7)
    assert [stream.tokens for stream in streams] == [7, 7, 7]
    for stream in streams:
        assert list(stream.arrivals) == sorted(stream.arrivals)
    assert benchmark.rate(streams) > 0


def test_evicted_is_judged_against_the_bound(benchmark: Any) -> None:
    rates = {
        benchmark.EVICTED: [9.0, 8.0, 7.0],
        benchmark.BOUND: [10.0, 8.0, 8.0],
        benchmark.EXACT: [4.0, 4.0, 4.0],
    }
    bound, exact = benchmark.judged("case", rates)
    assert bound.ratios == [0.9, 1.0, 0.875] and bound.met is True
    assert exact.ratios == [2.25, 2.0, 1.75] and exact.met is None
    rates[benchmark.EVICTED][1] = 7.0
    assert benchmark.judged("case", rates)[0].met is False


def test_both_servers_answer_the_same_prompts_and_end(
    modules: tuple[ModuleType, ModuleType], folder: str
) -> None:
    serving, servers = modules
    prompts = ["Ship left port " * 20, "The harbour log of " * 12]
    flags = ["--kv-eviction", "snapkv", "--kv-budget", "60"]
    ports = []
    for server, rows in (
        (servers.kvkeep_server(folder, flags), [60, 60]),
        (servers.stock_server(folder), [0, 0]),
    ):
        with server as running, serving.clients_of(running, 2) as clients:
            streams = serving.asked(clients, prompts, 5)
            assert [stream.tokens for stream in streams] == [5, 5]
            assert [stream.rows for stream in streams] == [pytest.approx(r, abs=1) for r in rows]
            assert all(0 < len(stream.arrivals) <= 5 for stream in streams)
            ports.append(running.url)
        health = running.url.replace("/v1", "/health")
        assert not servers._healthy(health)
    assert len(set(ports)) == 2


def test_a_server_that_does_not_start_says_why(
    modules: tuple[ModuleType, ModuleType], tmp_path: Path
) -> None:
    flags = ["--kv-eviction", "spam"]
    with (
        pytest.raises(SystemExit, match=r"did not start[^$]*spam"),
        modules[1].kvkeep_server(str(tmp_path), flags),
    ):
        pass


@pytest.mark.slow
def test_from_the_command_to_the_files(folder: str, tmp_path: Path) -> None:
    # Tiny steps are short beside the half second in which a server takes up no request.
    command = [sys.executable, str(FOLDER / "serving.py"), "--model", folder, "--requests", "2"]
    asked = ["--prompt-tokens", "200", "--max-tokens", "2000", "--rounds", "2"]
    out = tmp_path / "serving"
    run = subprocess.run(
        [*command, *asked, "--out", str(out)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode in (0, 1), run.stderr  # whether it is fast enough is not asked here
    assert "kvkeep serve, evicted" in out.with_suffix(".md").read_text(encoding="utf-8")
    assert "50 rows each" in run.stdout


@pytest.mark.parametrize("flag", ["--requests", "--rounds", "--max-tokens"])
def test_sizes_out_of_range_are_refused(benchmark: Any, flag: str) -> None:
    with pytest.raises(SystemExit) as refused:
        benchmark.parse([flag, "0"])
    assert refused.value.code == 2
