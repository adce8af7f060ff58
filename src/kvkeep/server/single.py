"""What mlx-lm serves one at a time: draft models, quantised caches, seeds, and policies that
must see the whole prefill."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mlx_lm.generate import GenerationResponse
from mlx_lm.generate import stream_generate as mlx_stream_generate

from kvkeep import generation
from kvkeep.compaction import kept_as_it_is
from kvkeep.server import current
from kvkeep.server.current import Plan
from kvkeep.server.reports import exact_report, report_of


def stream_generate(**options: Any) -> Generator[GenerationResponse, None, None]:
    """`mlx_lm.stream_generate` as mlx-lm's server calls it, evicting as this thread's plan asks.

    The plan stays this thread's: the cache that mlx-lm keeps afterwards is described by it.

    Args:
        options: its keywords; `prompt` is what the cache does not hold yet.
    """
    plan = current.peek()
    if plan is None or not plan.kv.reported:
        yield from mlx_stream_generate(**options)
        return
    cache, model = options["prompt_cache"], options["model"]
    held = len(plan.prompt) - 1
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


def _report(
    plan: Plan, response: generation.GenerationResponse, held: int, cache: list[Any]
) -> dict[str, Any]:
    config, result = plan.kv.config, response.kv
    before = 0 if plan.hit is None else plan.hit.entry.compacted_at
    if config is None or (result is None and not before):
        return exact_report(held, cache, plan)
    if result is None:  # nothing was left to read but the prompt's last token
        result = kept_as_it_is(cache, held)
    plan.compacted_at = held if result.kv_layers else before
    return report_of(config, result, result.times.score + result.times.compact, plan)
