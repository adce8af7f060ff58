"""One run: every length and batch size of a plan that the file does not hold yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit

from kvkeep.bench.decoding import decode
from kvkeep.bench.files import ResultsFile
from kvkeep.bench.plan import BenchPlan
from kvkeep.bench.prompting import read_prompt
from kvkeep.bench.results import DecodeResult, PromptResult, Result, Setting
from kvkeep.bench.workloads import Workload
from kvkeep.errors import ConfigError

#: Called with a few words on what goes on.
Report = Callable[[str], None]


def run_bench(
    workload: Workload, plan: BenchPlan, file: ResultsFile, report: Report = lambda words: None
) -> None:
    """Measure what a file's results lack, adding each result as it comes.

    Args:
        file: of the workload's device and model.
        report: told what goes on.

    Raises:
        ConfigError: nothing would be evicted, or a policy needs a prefill that there is not.
        UnsupportedModelError: the model cannot be evicted.
        BenchFileError: the file cannot be written.
    """
    plan.require_evicting()
    if workload.synthetic:
        plan.require_replayable()
    streams: list[Any] = [generation_stream]  # one per thread, which mlx-lm's annotation forgets
    with wired_limit(workload.model, streams), mx.stream(generation_stream):
        for length in plan.lengths:
            for result in _at_length(workload, plan, length, file, report):
                file.add(result)


def _at_length(
    workload: Workload, plan: BenchPlan, length: int, file: ResultsFile, report: Report
) -> Iterator[Result]:
    """Results of one length that are not there yet."""
    done = file.report.results
    prompt_done = any(_same_prompt(result, plan, length) for result in done)
    batches = [b for b in plan.batches if not any(_same_decode(r, plan, length, b) for r in done)]
    if prompt_done and not batches:
        return

    def told(words: str) -> None:
        report(f"T {length:,}: {words}")

    prompt, result = read_prompt(
        workload, plan, length, file.session, told, measure=not prompt_done
    )
    if not prompt.evicted:
        budgets = ", ".join(dict.fromkeys(str(c.limit) for c in plan.settings_at(length)))
        raise ConfigError(
            f"nothing is evicted of {length} tokens",
            expected="a budget below the cache",
            received=budgets,
        )
    if result is not None:
        yield result
    for batch in batches:

        def told_of(words: str, batch: int = batch) -> None:
            told(f"batch {batch}: {words}")

        yield decode(workload, plan, prompt, batch, file.session, told_of)


def _all_there(plan: BenchPlan, length: int, found: list[Setting]) -> bool:
    """Whether these are the plan's settings; byte budgets that evict nothing have no result."""
    asked = plan.settings_at(length)
    sure = {Setting.of(config) for config in asked if config.limit.unit != "bytes"}
    return sure <= set(found) <= {Setting.of(config) for config in asked}


def _same_prompt(result: Result, plan: BenchPlan, length: int) -> bool:
    """Whether a result is what the plan would measure of a prompt."""
    return (
        isinstance(result, PromptResult)
        and (result.length, result.step, result.seed) == (length, plan.prefill_step, plan.seed)
        and result.rounds == plan.prompt_rounds
        and _all_there(plan, length, [c.setting for c in result.compactions])
    )


def _same_decode(result: Result, plan: BenchPlan, length: int, batch: int) -> bool:
    """The same for decoding."""
    return (
        isinstance(result, DecodeResult)
        and (result.length, result.batch, result.seed) == (length, batch, plan.seed)
        and (result.tokens, result.rounds) == (plan.tokens, plan.rounds)
        and _all_there(plan, length, [r.setting for r in result.runs if r.setting is not None])
    )
