"""Many requests of every sort, and clients that leave: nothing breaks and nothing is left."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvkeep.caches import allocated_nbytes
from kvkeep.spec import EvictionConfig
from serving import Running, running
from soaking import (
    PROBES,
    Outcome,
    bytes_in_generators,
    jobs,
    level,
    parts,
    send_all,
    settle,
    stored,
    watching,
)
from test_serve_seeing import fetch
from tiny_folder import write_tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")

# Small enough that requests wait, prompts are read in pieces and the prompt cache overflows.
FLAGS = ("--decode-concurrency", "4", "--prompt-concurrency", "2", "--prefill-step-size", "128")
ENTRIES, LIMIT = 6, 1_800_000  # a row takes 1024 bytes, and there are prompts of 700 tokens
STORE = ("--prompt-cache-size", str(ENTRIES))
CONFIG = EvictionConfig.parse({"policy": "snapkv", "budget": 64})
SETTINGS: dict[str, Any] = {"evicting": True, "config": CONFIG, "max_body_bytes": 100_000}
GOVERNED = {"kv_memory": LIMIT, "kv_memory_shrink": True, "kv_queue_seconds": 0.3}
WAYS: dict[str, dict[str, Any]] = {
    "free": {},
    "governed": {**GOVERNED, "keep_compact": True},
}
MB = 2**20


@pytest.fixture(params=list(WAYS))
def server(tmp_path: Any, request: pytest.FixtureRequest) -> Iterator[Running]:
    folder = write_tiny_folder(tmp_path / "model", endless=True)
    settings = {**SETTINGS, **WAYS[request.param]}
    with running(str(folder), *FLAGS, *STORE, **settings) as server:
        yield server


def test_a_short_soak(
    server: Running, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    soak(server, 40, 60, caplog, capfd, seed=5, warm_up=20)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1])
def test_a_long_soak(
    server: Running, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], seed: int
) -> None:
    assert soak(server, 600, 900, caplog, capfd, seed=seed, warm_up=150) >= 500


def soak(
    server: Running,
    count: int,
    seconds: float,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    *,
    seed: int,
    warm_up: int,
) -> int:
    """Send, watch, and account for everything afterwards; how many requests were sent."""
    caplog.set_level(logging.WARNING)
    warm = send_all(server, jobs(seed + 1000, warm_up), clients=8, seconds=seconds)
    before = level(server)
    with watching(server) as faults:
        outcomes = send_all(server, jobs(seed, count), clients=8, seconds=seconds)
    assert faults == []
    check_answers(outcomes)
    settle(server)
    check_books(server, [*warm, *outcomes])
    after = level(server)
    with capfd.disabled():  # for those who watch
        statuses = sorted(Counter(one.status for one in outcomes).items())
        print(f"\n{len(outcomes)} requests, by status (0: left) {dict(statuses)}; {after}")
    assert after.threads <= before.threads
    assert abs(after.active - before.active) < MB / 16
    assert after.freed == pytest.approx(after.counted, abs=MB / 16)
    assert after.resident - before.resident < 64 * MB
    assert server.get("/health")[0] == 200
    told = [record for record in caplog.records if record.exc_info]
    assert told == [], told[0].exc_text
    assert "Traceback" not in capfd.readouterr().err
    return len(outcomes)


def check_answers(outcomes: list[Outcome]) -> None:
    """Every answer is whole, in a known shape, and its numbers hold."""
    for one in outcomes:
        detail = (one.job, one.status, one.raw[-500:])
        if one.job.leave != "stay":
            assert one.status < 500 or one.status == 503, detail
            continue
        assert one.status == 503 or 200 <= one.status < 500, detail
        if one.status != 200:
            (error,) = [part["error"] for part in parts(one.raw)]
            assert set(error) == {"message", "type", "param", "code"}, detail
            continue
        assert one.job.sound, detail
        last = parts(one.raw)[-1]
        if "error" in last:  # of a stream that had begun
            assert last["error"]["type"] == "invalid_request_error", detail
            continue
        assert not one.job.body.get("stream") or one.raw.endswith(b"data: [DONE]\n\n"), detail
        (usage,) = one.usages or [None]
        if usage is None:
            assert one.job.body.get("stream") and "stream_options" not in one.job.body, detail
            continue
        assert 1 <= usage["completion_tokens"] <= one.job.body["max_tokens"], detail
        kv = usage["kv"]
        assert kv["prompt_tokens"] == usage["prompt_tokens"], detail
        assert 1 <= kv["retained_tokens"] <= kv["prompt_tokens"], detail
        assert kv["compact_bytes"] <= kv["exact_bytes"], detail


def check_books(server: Running, outcomes: list[Outcome]) -> None:
    """No row is in flight, and all that are stored or were counted are accounted for."""
    governor, now = server.responses.governor, server.get("/v1/kv")[1]
    assert now["in_flight"] == {"exact": 0, "compact": 0}
    assert bytes_in_generators() == governor.reserved == len(server.responses.admission) == 0
    if governor.limit is not None:
        assert governor.peak <= governor.limit
    cache = server.responses.prompt_cache
    entries = stored(server)
    assert sum(kind["entries"] for kind in now["prompt_cache"].values()) == len(entries)
    assert len(entries) <= ENTRIES
    nbytes = sum(allocated_nbytes(layers) for layers in entries)
    assert cache.nbytes == nbytes == sum(kind["bytes"] for kind in now["prompt_cache"].values())
    raw = fetch(server, "/metrics")[2].decode()
    names = {s.name: s for f in text_string_to_metric_families(raw) for s in f.samples}
    counted = sum(
        sample.value
        for family in text_string_to_metric_families(raw)
        for sample in family.samples
        if sample.name == "kvkeep_requests_total"
    )
    assert counted == now["totals"]["requests"]
    # A client that goes early enough leaves no request behind.
    early = sum(one.job.leave in ("half", "before") for one in outcomes)
    sent = len(outcomes) + len(PROBES)
    assert sent - early <= counted <= sent
    answered = sum(usage["completion_tokens"] for one in outcomes for usage in one.usages)
    assert names["kvkeep_generated_tokens_total"].value >= answered > 0
