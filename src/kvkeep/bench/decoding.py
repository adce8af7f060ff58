"""Decode steps of exact, bound and evicted caches, interleaved, by mlx-lm's own stepping."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.generate import PromptProcessingBatch, generate_step, generation_stream

from kvkeep.bench.plan import BenchPlan
from kvkeep.bench.prompting import Prompt
from kvkeep.bench.results import DecodeResult, DecodeRun, Role, Setting
from kvkeep.bench.timing import interleaved, rounds_told, seconds
from kvkeep.bench.workloads import Workload, first_rows
from kvkeep.caches import allocated_nbytes
from kvkeep.compaction import cache_nbytes


@dataclass(frozen=True)
class _Contender:
    """What decodes: one request's cache list, of which a batch gets copies."""

    role: Role
    setting: Setting | None
    rows: int
    cache: list[Any]


class Stepper(Protocol):
    """One step after the other; MLX computes each while Python waits for the one before.

    Attributes:
        cache: what the steps run over.
        started: steps that were set off before the first call of `step`.
    """

    cache: list[Any]
    started: int

    def step(self) -> None:
        """Set off one more step, and wait for the last but one."""
        ...


class SingleStepper:
    """One request, stepped by mlx-lm's `generate_step`."""

    def __init__(self, model: Any, cache: list[Any], token: int) -> None:
        self.cache, self.started = cache, 2
        self._steps = generate_step(mx.array([token]), model, max_tokens=-1, prompt_cache=cache)
        next(self._steps)

    def step(self) -> None:
        """See `Stepper`."""
        next(self._steps)


class BatchStepper:
    """Several requests, merged and stepped as mlx-lm's `BatchGenerator` does it.

    Its two halves are used as it uses them: what prefills a batch merges the caches, and the
    batch that it hands on generates.
    """

    def __init__(self, model: Any, caches: Sequence[list[Any]], token: int) -> None:
        count = len(caches)
        prompts = PromptProcessingBatch(
            model, list(range(count)), list(caches), max_tokens=[sys.maxsize] * count
        )
        self._batch = prompts.generate([[token]] * count)
        self.cache, self.started = self._batch.prompt_cache, 1

    def step(self) -> None:
        """See `Stepper`."""
        self._batch.next()


class Rounds:
    """Rounds of the same steps: rows are taken back after each, so every one starts from R.

    Args:
        stepper: fresh.
        tokens: steps per round.
    """

    def __init__(self, stepper: Stepper, tokens: int) -> None:
        self._stepper, self._tokens = stepper, tokens
        # State that cannot be taken back (a full sliding window, a recurrent state) goes on.
        self._rewinds = all(layer.is_trimmable() for layer in stepper.cache)
        self._settle(stepper.started)

    def __call__(self) -> float:
        """Seconds of one round."""
        elapsed = seconds(self._steps)
        self._settle(self._tokens)
        return elapsed

    def _steps(self) -> None:
        for _ in range(self._tokens):
            self._stepper.step()
        mx.synchronize(generation_stream)  # the step that is still being computed

    def _settle(self, steps: int) -> None:
        mx.synchronize(generation_stream)
        if self._rewinds:
            for layer in self._stepper.cache:
                layer.trim(steps)


def decode(
    workload: Workload,
    plan: BenchPlan,
    prompt: Prompt,
    batch: int,
    session: int,
    report: Callable[[str], None],
) -> DecodeResult:
    """Decode over the exact caches, the bounds and every setting's, in turns.

    Each request of a batch has the same rows: what they hold changes no time.

    Args:
        prompt: its caches stay as they are.
        batch: requests that decode together.
        session: noted in the result.
        report: told what goes on.
    """
    contenders = _contenders(prompt)
    rounds: dict[str, Rounds] = {}
    found: dict[str, DecodeRun] = {}
    with mx.stream(generation_stream):
        for index, contender in enumerate(contenders):
            report(f"preparing {index + 1}/{len(contenders)}")
            name = str(index)
            rounds[name], found[name] = _prepared(
                workload, contender, prompt.tokens[-1], batch, plan.tokens
            )
        times = interleaved(
            rounds,
            plan.rounds,
            seed=plan.seed,
            report=rounds_told(report, f"decoding, {len(contenders)} caches in turns"),
        )
    runs = tuple(
        DecodeRun(**{**vars(found[name]), "seconds": tuple(times[name])}) for name in rounds
    )
    return DecodeResult(len(prompt.tokens), batch, plan.tokens, plan.seed, session, runs)


def _contenders(prompt: Prompt) -> list[_Contender]:
    """The exact cache, a bound for each number of rows, and the settings."""
    bounds = dict.fromkeys(result.retained_tokens for result in prompt.evicted.values())
    return [
        _Contender("exact", None, len(prompt.tokens), prompt.exact),
        *(_Contender("bound", None, rows, first_rows(prompt.exact, rows)) for rows in bounds),
        *(
            _Contender("evicted", Setting.of(config), result.retained_tokens, result.cache)
            for config, result in prompt.evicted.items()
        ),
    ]


def _prepared(
    workload: Workload, contender: _Contender, token: int, batch: int, tokens: int
) -> tuple[Rounds, DecodeRun]:
    """A contender's rounds, and its figures but for the time, from one round of its own."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    requests = [copy.deepcopy(contender.cache) for _ in range(batch)]
    live = sum(cache_nbytes(request) for request in requests)
    stepper: Stepper
    if batch == 1:
        stepper = SingleStepper(workload.model, requests[0], token)
    else:
        stepper = BatchStepper(workload.model, requests, token)
    del requests
    rounds = Rounds(stepper, tokens)
    mx.clear_cache()
    mx.reset_peak_memory()  # what merging took is no part of decoding
    elapsed = rounds()
    peak = mx.get_peak_memory() - before
    run = DecodeRun(
        role=contender.role,
        setting=contender.setting,
        rows=contender.rows,
        seconds=(elapsed,),
        live_nbytes=live,
        allocated_nbytes=allocated_nbytes(stepper.cache),
        peak_nbytes=workload.facts.weights_nbytes + peak,
    )
    return rounds, run
