"""What mlx-lm serves one at a time: draft models, quantised caches, seeds, and policies that
must see the whole prefill."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mlx_lm.generate import GenerationResponse
from mlx_lm.generate import stream_generate as mlx_stream_generate

from kvkeep import generation
from kvkeep.server import current
from kvkeep.server.reports import exact_report, report_of
from kvkeep.server.settings import KvRequest


def stream_generate(**options: Any) -> Generator[GenerationResponse, None, None]:
    """`mlx_lm.stream_generate` as mlx-lm's server calls it, evicting as this thread's plan asks.

    Args:
        options: its keywords; `prompt` is what the cache does not hold yet.
    """
    plan = current.take()
    if plan is None or not plan.kv.reported:
        yield from mlx_stream_generate(**options)
        return
    cache, model = options["prompt_cache"], options["model"]
    held = len(plan.prompt) - 1
    for response in generation.stream_generate(
        options.pop("model"),
        options.pop("tokenizer"),
        options.pop("prompt"),
        config=plan.kv.config,
        **options,
    ):
        if plan.kv.report is None:
            plan.kv.report = _report(plan.kv, response, held, cache[: len(model.layers)])
        yield response


def _report(
    kv: KvRequest, response: generation.GenerationResponse, held: int, cache: list[Any]
) -> dict[str, Any]:
    if kv.config is None or response.kv is None:
        return exact_report(held, cache)
    times = response.kv.times
    return report_of(kv.config, response.kv, times.score + times.compact)
