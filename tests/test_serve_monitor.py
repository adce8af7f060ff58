"""The monitor and the log lines by themselves."""

from __future__ import annotations

import json
import logging
import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.server.logs import JsonFormatter, fields_of, logfmt, write_json
from kvkeep.server.monitor import RECENT, Entry, Monitor, RequestView, Stored

REPORT = {
    "policy": "snapkv",
    "prompt_tokens": 100,
    "retained_tokens": 25,
    "exact_bytes": 4000,
    "compact_bytes": 1000,
    "compact_ms": 2.5,
    "evicted": True,
}


def served(monitor: Monitor, name: str = "a", tokens: int = 3) -> Entry:
    entry = monitor.begin(name, kind="/v1/completions")
    entry.asks("snapkv", "25%", stream=True)
    entry.queued()
    entry.admitted(100, 40, "exact")
    entry.compacted(REPORT)
    for _ in range(tokens):
        entry.token()
    return entry


def test_a_requests_way() -> None:
    monitor = Monitor()
    entry = monitor.begin("a", kind="/v1/completions")
    assert monitor.snapshot().live == ()  # its body is not read yet
    entry.asks("snapkv", "25%", stream=False)
    states, seen = [], []
    events: list[tuple[Any, ...]] = [
        (entry.queued,),
        (entry.admitted, 100, 40, "exact"),
        (entry.prefill, 30, 60),
        (entry.compacted, REPORT),
        (entry.token,),
        (entry.token,),
    ]
    for event, *args in events:
        event(*args)
        (one,) = monitor.snapshot().live
        states.append(one.state)
        seen.append((one.prefilled_tokens, one.retained_tokens, one.generated))
    assert states == ["queued", "prefill", "prefill", "prefill", "decode", "decode"]
    assert seen[1:5] == [(40, None, 0), (70, None, 0), (70, 25, 0), (70, 25, 1)]
    assert monitor.snapshot().in_flight == {"exact": 0, "compact": 1000}
    entry.finished(200, "stop")
    entry.finished(500, "again")
    entry.admitted(5, 5, "exact")
    entry.compacted(REPORT | {"retained_tokens": 1})
    now = monitor.snapshot()
    assert (now.live, now.in_flight["compact"], now.totals.requests) == ((), 0, 1)
    (one,) = now.recent
    assert (one.state, one.status, one.reason) == ("done", 200, "stop")
    assert (one.prompt_tokens, one.retained_tokens, one.evicted_tokens) == (100, 25, 75)
    assert one == entry.view()


def test_totals_count_live_requests_and_never_fall() -> None:
    monitor, sums = Monitor(), []
    for name in "abc":
        entry = served(monitor, name)
        sums.append(monitor.snapshot().totals)
        entry.finished(200, "stop")
        sums.append(monitor.snapshot().totals)
    assert [total.requests for total in sums] == [0, 1, 1, 2, 2, 3]
    assert [total.generated_tokens for total in sums] == [3, 3, 6, 6, 9, 9]
    assert [total.rows_evicted for total in sums] == [75, 75, 150, 150, 225, 225]
    assert sums[-1].reused_tokens == {"exact": 120, "compact": 0}
    assert (sums[-1].prompt_tokens, sums[-1].rows_kept) == (300, 75)


def test_what_was_admitted_twice_counts_once() -> None:
    monitor = Monitor()
    entry = monitor.begin("a")
    entry.queued()
    entry.admitted(100)
    entry.admitted(100, 60, "compact")
    assert monitor.snapshot().totals.prompt_tokens == 100
    assert monitor.snapshot().totals.reused_tokens == {"exact": 0, "compact": 60}
    entry.admitted(100, 0, "exact")
    assert monitor.snapshot().live[0].reuse == "none"


def test_only_the_last_ended_are_kept_newest_first() -> None:
    monitor = Monitor()
    for i in range(RECENT + 5):
        monitor.begin(str(i)).finished(400, "invalid_json")
    names = [one.id for one in monitor.snapshot().recent]
    assert names == [str(i) for i in range(RECENT + 4, 4, -1)]


def test_same_ids_do_not_mix() -> None:
    monitor = Monitor()
    first, second = served(monitor, "same", 1), served(monitor, "same", 2)
    assert len(monitor.snapshot().live) == 2
    first.finished(200, "stop")
    assert [one.generated for one in monitor.snapshot().live] == [2]
    second.finished(200, "stop")
    assert monitor.snapshot().totals.generated_tokens == 3


def test_listeners_hear_each_end_once_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    monitor, heard = Monitor(), []

    def failing(view: RequestView) -> None:
        raise RuntimeError("no disk")

    monitor.listeners += [failing, heard.append]
    entry = served(monitor)
    entry.finished(200, "stop")
    entry.finished(200, "stop")
    assert [view.id for view in heard] == ["a"]
    assert "A listener failed" in caplog.text


def test_what_the_server_says_of_its_bytes_is_shown() -> None:
    monitor = Monitor()
    monitor.prompt_cache = lambda: {"compact": Stored(2, 30)}
    monitor.in_flight = lambda: {"exact": 7}
    monitor.limits = {"kv_memory": 100}
    now = monitor.snapshot()
    assert now.prompt_cache == {"exact": Stored(), "compact": Stored(2, 30)}
    assert (now.in_flight, now.limits) == ({"exact": 7, "compact": 0}, {"kv_memory": 100})


def test_many_threads_lose_nothing() -> None:
    monitor, faults, over = Monitor(), [], threading.Event()

    def serve() -> None:
        for i in range(150):
            served(monitor, str(i), 4).finished(200, "stop")

    def watch() -> None:
        last = 0
        while not over.is_set():
            total = monitor.snapshot().totals.generated_tokens
            if total < last:
                faults.append((last, total))
            last = total

    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        watcher, threads = threading.Thread(target=watch), []
        watcher.start()
        threads = [threading.Thread(target=serve) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        over.set()
        sys.setswitchinterval(old)
    watcher.join()
    assert faults == []
    now = monitor.snapshot()
    assert (now.live, now.totals.requests, now.totals.generated_tokens) == ((), 900, 3600)


# -- lines -----------------------------------------------------------------------------


def parse_logfmt(line: str) -> dict[str, str]:
    fields, rest = {}, line
    while rest:
        name, _, rest = rest.partition("=")
        if rest.startswith('"'):
            fields[name], stop = json.JSONDecoder().raw_decode(rest)
            rest = rest[stop:].removeprefix(" ")
        else:
            fields[name], _, rest = rest.partition(" ")
    return fields


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), st.text(), max_size=5))
def test_key_value_lines_are_one_line_and_read_back(fields: dict[str, str]) -> None:
    line = logfmt({**fields, "unknown": None})
    assert parse_logfmt(line) == fields
    assert line.isascii() and (line.isprintable() or not line)


@pytest.fixture
def record() -> logging.LogRecord:
    monitor, lines = Monitor(), []
    monitor.listeners.append(lambda view: lines.append(fields_of(view)))
    served(monitor, "id-1").finished(200, "stop")
    extra = {"kvkeep_fields": lines[0]}
    return logging.getLogger("kvkeep.server").makeRecord(
        "kvkeep.server", logging.INFO, __file__, 1, "%s", (logfmt(lines[0]),), None, None, extra
    )


def test_json_lines(record: logging.LogRecord) -> None:
    line = JsonFormatter().format(record)
    told = json.loads(line)
    assert "\n" not in line and "message" not in told
    assert (told["level"], told["logger"], told["id"]) == ("info", "kvkeep.server", "id-1")
    assert (told["prompt_tokens"], told["reused"], told["retained"]) == (100, 40, 25)
    assert (told["compact_ms"], told["generated"], told["status"]) == (2.5, 3, 200)
    assert told["time"].endswith("Z") and "T" in told["time"]


def test_json_lines_of_others_and_of_faults() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        fault = sys.exc_info()
    record = logging.LogRecord("x", logging.ERROR, __file__, 1, 'a "%s"', ("b",), fault)
    line = JsonFormatter().format(record)
    told = json.loads(line)
    assert told["message"] == 'a "b"' and "ValueError: two" in told["exception"]
    assert "\n" not in line


def test_json_is_what_the_log_on_stderr_becomes(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other = logging.StreamHandler(), logging.FileHandler("/dev/null", delay=True)
    monkeypatch.setattr(logging.getLogger(), "handlers", [plain, other])
    try:
        write_json()
        assert isinstance(plain.formatter, JsonFormatter) and other.formatter is None
    finally:
        logging.captureWarnings(False)
