"""Peak memory of prefill and compaction, against the same chunked prefill alone."""

from __future__ import annotations

from prefills import BUDGET, POLICIES, STOCK, readings
from results import Result, Target
from workloads import Options

PEAK = Target("at most", 1.03)
MEGABYTE = 1e6


def run(options: Options) -> list[Result]:
    """Per prefill step and policy: peak with and without the weights, and what is left."""
    results = []
    for setting, runs in readings(options).items():
        case = f"{setting}, {BUDGET:.0%} kept"
        for policy in POLICIES:
            pair = runs[policy], runs[STOCK]
            for what, attribute, target in (
                ("peak", "peak", PEAK),
                ("peak without weights", "own_peak", PEAK),
                ("left afterwards", "kept", None),
            ):
                mine, stock = (
                    [getattr(reading, attribute) / MEGABYTE for reading in side] for side in pair
                )
                results.append(
                    Result(
                        case,
                        f"{policy}: {what}",
                        mine,
                        "MB",
                        STOCK,
                        stock,
                        "subject / baseline",
                        target,
                    )
                )
    return results
