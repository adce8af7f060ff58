"""What the server shows of itself: /v1/kv, /metrics, request ids and log lines."""

from __future__ import annotations

import http.client
import json
import logging
import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from email.message import Message
from typing import Any

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kvkeep.cli import serve as command
from kvkeep.cli.main import build_parser
from kvkeep.server import batching
from serving import CHAT, TEXT, Running, chat, eventually, running, usage_of
from tiny_folder import write_tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")

WORDS = " ".join(f"Line {i}: {i * i} boats came in." for i in range(12))
SMALL = {"eviction": "snapkv", "budget": 48, "window": 8}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
SHARED = ("policy", "prompt_tokens", "retained_tokens", "exact_bytes", "compact_bytes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("seen") / "model", endless=True))


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[Running]:
    with running(folder) as server:
        yield server


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches step slowly enough to be looked at."""
    step = batching.EvictingBatchGenerator._next

    def slowly(self: Any) -> Any:
        time.sleep(0.01)
        return step(self)

    monkeypatch.setattr(batching.EvictingBatchGenerator, "_next", slowly)


def fetch(
    server: Running, path: str, method: str = "GET", body: Any = None, **headers: str
) -> tuple[int, Message, bytes]:
    """Status, headers and body as they came."""
    raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request(method, path, raw, names)
        response = connection.getresponse()
        return response.status, response.headers, response.read()


@contextmanager
def streaming(server: Running, body: dict[str, Any], **headers: str) -> Iterator[Any]:
    """A streamed answer, some of it read; the client leaves at the block's end."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request("POST", CHAT, json.dumps(body).encode(), headers)
        response = connection.getresponse()
        while not response.readline().startswith(b"data: "):
            pass
        yield response
        response.close()


def status(server: Running) -> dict[str, Any]:
    code, answer = server.get("/v1/kv")
    assert code == 200
    return answer


def ended(server: Running, request_id: str) -> dict[str, Any]:
    """A request of the recent ones; it is there soon after its answer."""
    found = eventually(
        lambda: [r for r in status(server)["requests"]["recent"] if r["id"] == request_id]
    )
    return found[0]


def metrics(server: Running) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    code, headers, raw = fetch(server, "/metrics")
    assert (code, headers["Content-Type"].split(";")[0]) == (200, "text/plain")
    families = list(text_string_to_metric_families(raw.decode()))
    assert all(family.documentation for family in families)
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def value(samples: Any, name: str, **labels: str) -> float:
    return samples.get((f"kvkeep_{name}", frozenset(labels.items())), 0.0)


# -- /v1/kv ----------------------------------------------------------------------------


def test_a_live_request_and_what_stays_of_it(server: Running, slow: None) -> None:
    body = chat("Be brief.", WORDS, kv=SMALL, max_tokens=80, **USAGE)
    with streaming(server, body, **{"X-Request-Id": "live-1"}) as response:
        now = eventually(lambda: (s := status(server))["requests"]["live"] and s)
        (one,) = now["requests"]["live"]
        assert now["requests"]["states"] == {"queued": 0, "prefill": 0, "decode": 1}
        assert (one["id"], one["state"], one["stream"]) == ("live-1", "decode", True)
        assert (one["policy"], one["budget"], one["status"]) == ("snapkv", "48", None)
        assert now["in_flight"]["exact"] == 0
        assert now["in_flight"]["compact"] >= one["compact_bytes"]  # with room for the answer
        later = eventually(lambda: [r for r in live(server) if r["generated"] > one["generated"]])
        assert later[0]["age_s"] > one["age_s"]
        rest = response.read().decode()
    usage = json.loads(re.findall(r"data: (.*\"usage\".*)", rest)[0])["usage"]
    for name in SHARED:
        assert one[name] == usage["kv"][name], name
    done = ended(server, "live-1")
    assert {name: done[name] for name in SHARED} == {name: usage["kv"][name] for name in SHARED}
    assert (done["state"], done["status"], done["reason"]) == ("done", 200, "length")
    assert done["generated"] == usage["completion_tokens"] == 80
    assert done["reused_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert done["compact_s"] == pytest.approx(usage["kv"]["compact_ms"] / 1000, abs=1e-4)
    assert done["queue_s"] + done["prefill_s"] <= done["first_token_s"] + 1e-3 < done["age_s"]
    assert done["tokens_per_s"] == pytest.approx(79 / (done["age_s"] - done["first_token_s"]), 0.01)
    now = status(server)
    assert (now["requests"]["live"], now["in_flight"]) == ([], {"exact": 0, "compact": 0})


def live(server: Running) -> list[dict[str, Any]]:
    return status(server)["requests"]["live"]


def test_the_prompt_cache_and_its_reuse_are_shown(folder: str) -> None:
    with running(folder) as server:
        empty = {"entries": 0, "bytes": 0}
        assert status(server)["prompt_cache"] == {"exact": empty, "compact": empty}
        usages = [usage_of(server.ask(chat("Be kind.", WORDS + end))) for end in ("A", "B")]
        cached = usages[1]["prompt_tokens_details"]["cached_tokens"]
        assert cached > len(WORDS)
        now = eventually(lambda: (s := status(server))["totals"]["requests"] == 2 and s)
        cache = server.responses.prompt_cache
        eventually(  # the last answer is given before its cache is kept
            lambda: (
                status(server)["prompt_cache"]["exact"]
                == {"entries": len(cache), "bytes": cache.nbytes}
            )
        )
        assert len(cache) > 0
        assert now["totals"]["reused_tokens"] == {"exact": cached, "compact": 0}
        assert now["totals"]["prompt_tokens"] == sum(u["prompt_tokens"] for u in usages)
        assert now["requests"]["recent"][0]["reuse"] == "exact"
        assert now["requests"]["recent"][0]["reused_tokens"] == cached
        assert now["limits"]["kv_memory"] is None


def test_a_request_served_alone_is_seen(server: Running) -> None:
    answer = server.send(
        chat(WORDS, kv=SMALL, seed=3, max_tokens=5), headers={"X-Request-Id": "alone"}
    )[1]
    done = ended(server, "alone")
    assert (done["generated"], done["policy"]) == (5, "snapkv")
    assert done["retained_tokens"] == usage_of(answer)["kv"]["retained_tokens"] == 49


# -- who may look ----------------------------------------------------------------------


def test_the_key_guards_all_but_the_empty_page(folder: str) -> None:
    with running(folder, api_key="secret") as server:
        for path in ("/v1/kv", "/metrics", "/v1/kv?x=1"):
            code, headers, raw = fetch(server, path)
            assert (code, json.loads(raw)["error"]["code"]) == (401, "invalid_api_key")
            assert fetch(server, path, Authorization="Bearer wrong")[0] == 401
            assert fetch(server, path, Authorization="Bearer secret")[0] == 200
        for path, kind in (
            ("/kv", "text/html"),
            ("/kv/page.js", "text/javascript"),
            ("/kv/page.css", "text/css"),
            ("/kv/icon.svg", "image/svg+xml"),
        ):
            code, headers, raw = fetch(server, path)
            assert (code, headers["Content-Type"].split(";")[0]) == (200, kind)
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            assert "unsafe" not in headers["Content-Security-Policy"]
            assert int(headers["Content-Length"]) == len(raw)
            assert not re.search(rb"(?:src|href)=\"(?:https?:)?//|@import|url\(", raw)
        assert fetch(server, "/kv/nothing", Authorization="Bearer secret")[0] == 404


def test_other_paths_are_as_before(server: Running) -> None:
    assert fetch(server, "/v1/kvs")[0] == fetch(server, "/kv/../kv")[0] == 404
    assert fetch(server, "/metrics", method="HEAD")[0] == 501
    assert fetch(server, "/health")[0] == 200
    assert server.refused({}, "/v1/kv")[0] == 404
    for path in ("/v1/kv", "/metrics"):  # no page of another origin may read them
        headers = fetch(server, path, Origin="http://elsewhere")[1]
        assert headers["Access-Control-Allow-Origin"] is None
        assert headers["Cache-Control"] == "no-store"


def test_request_ids(server: Running) -> None:
    made = set()
    for given in ("", "a b", "x" * 65, "é", 'a"b', "a=b\tc"):
        headers = {"X_Request_Id": given} if given else {}
        name = fetch(server, CHAT, "POST", chat("Hi", max_tokens=1), **headers)[1]["X-Request-Id"]
        assert re.fullmatch(r"[0-9a-f]{32}", name) and name != given
        made.add(name)
    assert len(made) == 6
    own = "req_A-9.b:" + "x" * 54
    for body, code in ((chat("Hi", max_tokens=1), 200), (b"{", 400), (chat("Hi", **USAGE), 200)):
        got, headers, _ = fetch(server, CHAT, "POST", body, X_Request_Id=own)
        assert (got, headers["X-Request-Id"]) == (code, own)


# -- /metrics --------------------------------------------------------------------------


def test_metrics_count_what_was_sent(folder: str, slow: None) -> None:
    with running(folder, api_key="secret") as server:
        key = {"Authorization": "Bearer secret"}

        def send(body: Any, path: str = CHAT, **headers: str) -> Any:
            return server.send(body, path, headers={**key, **headers})

        usages = [usage_of(send(chat(WORDS, kv=SMALL, max_tokens=9))[1]) for _ in range(2)]
        usages.append(usage_of(send({"prompt": WORDS, "max_tokens": 4}, TEXT)[1]))
        assert send(b"{")[0] == 400
        assert send(chat("Hi", kv={"budget": -1}))[0] == 400
        assert send(chat("Hi"), Authorization="Bearer wrong")[0] == 401
        assert send(chat("Hi"), "/v1/nothing")[0] == 404
        assert "error" in send(chat(WORDS + "?", kv={"budget": "10B"}, stream=True))[1][-1]
        with streaming(server, chat("Hi", stream=True, max_tokens=5000), **key):
            pass
        headers = {"Authorization": "Bearer secret"}
        names = eventually(lambda: (m := scrape(server, headers)) and ended_count(m) == 9 and m)

        def requests(**labels: str) -> float:
            return value(names, "requests_total", **labels)

        assert requests(endpoint=CHAT, status="200", eviction="snapkv") == 2
        assert requests(endpoint=TEXT, status="200", eviction="none") == 1
        assert requests(endpoint=CHAT, status="400", eviction="none") == 2
        assert requests(endpoint=CHAT, status="401", eviction="none") == 1
        assert requests(endpoint="other", status="404", eviction="none") == 1
        assert requests(endpoint=CHAT, status="400", eviction="span") == 1
        assert requests(endpoint=CHAT, status="499", eviction="none") == 1
        reports = [usage["kv"] for usage in usages if "kv" in usage]
        kept = sum(report["retained_tokens"] for report in reports)
        assert value(names, "rows_kept_total") == kept
        prompts = sum(report["prompt_tokens"] for report in reports)
        assert value(names, "rows_evicted_total") == prompts - kept
        reused = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        assert value(names, "reused_tokens_total", kind="exact") >= reused > 0
        assert value(names, "prompt_tokens_total") > sum(u["prompt_tokens"] for u in usages)
        answered = value(names, "generated_tokens_total")
        assert sum(u["completion_tokens"] for u in usages) < answered < 5000
        assert value(names, "compaction_seconds_count") == value(names, "kept_ratio_count") == 2
        shares = sum(r["retained_tokens"] / r["prompt_tokens"] for r in reports)
        assert value(names, "kept_ratio_sum") == pytest.approx(shares)
        assert value(names, "time_to_first_token_seconds_count") == 4
        assert value(names, "request_duration_seconds_count") == 4
        stored = value(names, "kv_bytes", kind="prompt_cache_exact")
        assert stored == server.responses.prompt_cache.nbytes
        assert value(names, "kv_bytes", kind="in_flight_compact") == 0
        assert ("kvkeep_kv_limit_bytes", frozenset()) not in names


def scrape(server: Running, headers: dict[str, str]) -> Any:
    raw = fetch(server, "/metrics", **headers)[2].decode()
    families = text_string_to_metric_families(raw)
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def ended_count(samples: Any) -> float:
    return sum(n for (name, _), n in samples.items() if name == "kvkeep_requests_total")


def test_gauges_follow_live_requests_and_limits(server: Running, slow: None) -> None:
    monitor = server.responses.monitor
    before = value(metrics(server), "generated_tokens_total")
    with streaming(server, chat(WORDS, kv=SMALL, stream=True, max_tokens=5000)):
        names = metrics(server)
        assert value(names, "requests_live", state="decode") == 1
        assert value(names, "kv_bytes", kind="in_flight_compact") > 0
        later = eventually(
            lambda: (n := value(metrics(server), "generated_tokens_total")) > before + 5 and n
        )
    eventually(lambda: not live(server))
    assert value(metrics(server), "generated_tokens_total") >= later
    limits = monitor.limits
    monitor.limits = {**limits, "kv_memory": 10**9}
    assert value(metrics(server), "kv_limit_bytes") == 10**9
    assert status(server)["limits"]["kv_memory"] == 10**9
    monitor.limits = limits


def test_openmetrics_where_it_is_asked_for(server: Running) -> None:
    accept = "application/openmetrics-text; version=1.0.0"
    code, headers, raw = fetch(server, "/metrics", Accept=accept)
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    families = list(openmetrics.text_string_to_metric_families(raw.decode()))
    assert code == 200 and "kvkeep_kv_bytes" in {family.name for family in families}


# -- log lines -------------------------------------------------------------------------


def test_each_request_leaves_one_line(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvkeep.server")
    bodies: list[tuple[str, Any]] = [
        ("fine", chat("My secret is 4711.", WORDS, kv=SMALL, max_tokens=6)),
        ("plain", chat("My secret is 4711.", max_tokens=2)),
        ("broken", b'{"messages": "My secret is 4711.'),
        ("wrong", chat("My secret is 4711.", kv={"My secret is 4711.": 1})),
    ]
    answers = {}
    for name, body in bodies:
        answers[name] = server.send(body, headers={"X-Request-Id": name})
        ended(server, name)
    assert [record.levelname for record in caplog.records] == ["INFO"] * 4
    lines = [dict(p.split("=", 1) for p in m.split(" ")) for m in caplog.messages]
    assert [line["id"] for line in lines] == list(answers)
    assert [line["status"] for line in lines] == ["200", "200", "400", "400"]
    reasons = [line["reason"] for line in lines]
    assert reasons == ["length", "length", "invalid_json", "invalid_request_error"]
    fine, report = lines[0], usage_of(answers["fine"][1])["kv"]
    told = {name: fine[name] for name in ("policy", "budget", "generated", "endpoint")}
    assert told == {"policy": "snapkv", "budget": "48", "generated": "6", "endpoint": CHAT}
    assert int(fine["prompt_tokens"]) == report["prompt_tokens"]
    assert int(fine["retained"]) == report["retained_tokens"]
    assert int(fine["exact_bytes"]) == report["exact_bytes"]
    assert int(fine["compact_bytes"]) == report["compact_bytes"]
    assert float(fine["compact_ms"]) == pytest.approx(report["compact_ms"], abs=0.06)
    assert float(fine["queue_ms"]) + float(fine["prefill_ms"]) <= float(fine["ms"]) + 0.2
    assert float(fine["tok_s"]) > 0 and "tok_s" not in lines[2]
    assert not any("4711" in text or "secret" in text for text in caplog.messages)


def test_json_lines_are_a_flag() -> None:
    for flags, wanted in ((["--log-json"], True), ([], False)):
        args, _ = build_parser().parse_known_args(["serve", *flags])
        assert command.settings_of(args).log_json is wanted


def test_lines_of_those_that_leave_and_those_that_fail(
    server: Running, slow: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvkeep.server")
    body = chat("Hi", stream=True, max_tokens=5000)
    with streaming(server, body, **{"X-Request-Id": "left"}):
        pass
    assert ended(server, "left")["status"] == 499
    server.send(chat(WORDS, kv={"budget": "10B"}, stream=True), headers={"X-Request-Id": "failed"})
    assert ended(server, "failed")["generated"] == 0
    left, failed = caplog.messages
    assert "status=499 reason=disconnect" in left
    assert "status=400 reason=invalid_request_error" in failed
