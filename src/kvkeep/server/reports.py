"""`usage.kv`: what became of a request's cache."""

from __future__ import annotations

from typing import Any

from kvkeep.compaction import cache_nbytes
from kvkeep.server.current import Plan
from kvkeep.server.settings import EVICTION_OFF
from kvkeep.spec import EvictionConfig, SnapKVEvictionResult


def report_of(
    config: EvictionConfig | None, result: SnapKVEvictionResult, seconds: float, plan: Plan
) -> dict[str, Any]:
    """The report of a compaction of all but the prompt's last token.

    That token is read afterwards and stays: it counts in both numbers of tokens, and in no
    number of bytes.
    """
    return _report(
        config,
        result.original_tokens,
        result.retained_tokens,
        (result.exact_cache_nbytes, result.compact_cache_nbytes),
        seconds,
        result.evicted,
        plan,
    )


def exact_report(held: int, cache: list[Any], plan: Plan) -> dict[str, Any]:
    """The report of a cache that keeps its `held` rows."""
    size = cache_nbytes(cache)
    return _report(None, held, held, (size, size), 0.0, False, plan)


def _report(
    config: EvictionConfig | None,
    held: int,
    kept: int,
    nbytes: tuple[int, int],
    seconds: float,
    evicted: bool,
    plan: Plan,
) -> dict[str, Any]:
    hit, asked = plan.hit, plan.kv.shrunk_from
    return {
        "policy": EVICTION_OFF if config is None else config.policy,
        "budget": None if config is None else str(config.limit),
        "prompt_tokens": held + 1,
        "retained_tokens": kept + 1,
        "exact_bytes": nbytes[0],
        "compact_bytes": nbytes[1],
        "compact_ms": round(1000 * seconds, 3),
        "evicted": evicted,
        "reuse": {
            "kind": "none" if hit is None else hit.kind,
            "tokens": 0 if hit is None else hit.tokens,
        },
        **({} if asked is None else {"asked_budget": asked}),
    }
