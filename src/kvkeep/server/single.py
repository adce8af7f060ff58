"""What mlx-lm serves one at a time: draft models, quantised caches, seeds, and policies that
must see the whole prefill."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from mlx_lm.generate import GenerationResponse
from mlx_lm.generate import stream_generate as mlx_stream_generate

from kvkeep import generation
from kvkeep.caches import allocated_nbytes
from kvkeep.compaction import kept_as_it_is
from kvkeep.server import current
from kvkeep.server.counting import Progress
from kvkeep.server.current import Plan
from kvkeep.server.reports import exact_report, report_of

_STEP = 64  # tokens between two looks at what the cache takes


def stream_generate(**options: Any) -> Generator[GenerationResponse, None, None]:
    """`mlx_lm.stream_generate` as mlx-lm's server calls it, evicting as this thread's plan asks.

    The plan stays this thread's: the cache that mlx-lm keeps afterwards is described by it.

    Args:
        options: its keywords; `prompt` is what the cache does not hold yet.
    """
    plan = current.peek()
    if plan is None:
        yield from mlx_stream_generate(**options)
        return
    plan.placed = True
    cache = options["prompt_cache"]
    options["prompt_progress_callback"] = _noting(
        plan, cache, options.get("prompt_progress_callback")
    )
    responses = _evicting(plan, options) if plan.kv.reported else mlx_stream_generate(**options)
    for count, response in enumerate(responses):
        if plan.governor is not None and count % _STEP == 0:
            plan.governor.answering(plan)
            taken = allocated_nbytes(cache)
            plan.governor.note(*((0, taken) if plan.compacted_at else (taken, 0)))
        yield response


def _evicting(plan: Plan, options: dict[str, Any]) -> Iterator[GenerationResponse]:
    cache, model = options["prompt_cache"], options["model"]
    held = len(plan.prompt) - 1
    if plan.hit is not None and plan.hit.compacted_at and plan.hit.tokens == held:
        plan.compacted_at = plan.hit.compacted_at
        result = kept_as_it_is(cache[: len(model.layers)], held)
        plan.kv.report = report_of(plan.kv.config, result, 0.0, plan)
    if plan.keep is not None:
        options["on_prefilled"] = plan.keep
    for response in generation.stream_generate(
        options.pop("model"),
        options.pop("tokenizer"),
        options.pop("prompt"),
        config=plan.kv.config,
        **options,
    ):
        if plan.kv.report is None:
            plan.kv.report = _report(plan, response, held, cache[: len(model.layers)])
        yield response


def _noting(plan: Plan, cache: list[Any], progress: Progress | None) -> Progress:
    """A progress callback that notes what the prefill takes so far."""

    def note(done: int, total: int) -> None:
        if plan.governor is not None:
            plan.governor.note(allocated_nbytes(cache), 0)
        if progress is not None:
            progress(done, total)

    return note


def _report(
    plan: Plan, response: generation.GenerationResponse, held: int, cache: list[Any]
) -> dict[str, Any]:
    config, result = plan.kv.config, response.kv
    if config is None or result is None:
        return exact_report(held, cache, plan)
    if result.kv_layers:
        plan.compacted_at = held
    elif plan.hit is not None:
        plan.compacted_at = plan.hit.compacted_at
    return report_of(config, result, result.times.score + result.times.compact, plan)
