"""Scoring and compacting a prompt's cache, against the time of its prefill."""

from __future__ import annotations

from prefills import BUDGET, POLICIES, STOCK, readings
from results import Result, Target
from workloads import Options

SHARE = Target("at most", 0.03)


def run(options: Options) -> list[Result]:
    """Per prefill step and policy: the share of the prefill, and what observing adds to it."""
    results = []
    for setting, runs in readings(options).items():
        case = f"{setting}, {BUDGET:.0%} kept"
        stock = [reading.prefill for reading in runs[STOCK]]
        for policy in POLICIES:
            prefill = [reading.prefill for reading in runs[policy]]
            after = [reading.score + reading.compact for reading in runs[policy]]
            share = Result(
                case,
                f"{policy}: score + compact",
                after,
                "s",
                "its prefill",
                prefill,
                "subject / baseline",
                SHARE,
            )
            score = [reading.score for reading in runs[policy]]
            part = Result(case, f"{policy}: score alone", score, "s")
            observed = Result(
                case,
                f"{policy}: prefill, observed",
                prefill,
                "s",
                STOCK,
                stock,
                "subject / baseline",
            )
            results += [share, part, observed]
    return results
