"""Hundreds of seeded requests of every sort, sent to a server by clients that do not behave."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import os
import random
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvkeep.allocation import ALLOCATIONS
from kvkeep.policies import POLICIES
from kvkeep.policies.base import WindowPolicy
from kvkeep.server.batching import EvictingBatchGenerator
from kvkeep.spec import STORES
from serving import CHAT, TEXT, Running

SYSTEM = ("You are kind. " * 6, "Answer in one word, and never in two. " * 4)
TEXT_OF_ALL = "the harbour log says that many boats came in and 12 went out again , so it is said"
WORDS = TEXT_OF_ALL.split()
#: Sent by `level`: one for the batch, one served alone.
PROBES: tuple[dict[str, Any], ...] = (
    {"prompt": "abc", "max_tokens": 1, "kv": {"eviction": "none"}},
    {"prompt": "abc", "max_tokens": 1, "kv": {"eviction": "none"}, "seed": 1},
)
GARBAGE: tuple[Any, ...] = (
    b"",
    b"{",
    b"[]",
    b"\xff\xfe\x00",
    b'{"messages": NaN}',
    b"[" * 5000,
    {"messages": []},
    {"messages": "hello"},
    {"prompt": ""},
    {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": -1},
    {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"99999": 1}},
    {"messages": [{"role": "user", "content": "x"}], "kv": {"budgt": 1}},
    {"messages": [{"role": "user", "content": "x"}], "kv": {"eviction": "nothing-known"}},
    {"messages": [{"role": "user", "content": "x"}], "model": "../etc"},
)


@dataclass(frozen=True)
class Job:
    """One request.

    Attributes:
        leave: what the client does with it: "stay" to the end, go "after" some of a stream, go
            "before" any of the answer, or send "half" of the body.
        lines: of a stream that are read before it leaves.
        wait: seconds before a client that reads nothing leaves.
        sound: whether nothing is wrong with the body but, perhaps, its `kv`.
    """

    path: str
    body: Any
    leave: str = "stay"
    lines: int = 0
    wait: float = 0.0
    sound: bool = True


@dataclass
class Outcome:
    """What came of a job: status (0: the client left) and what was read."""

    job: Job
    status: int = 0
    raw: bytes = b""
    usages: list[dict[str, Any]] = field(default_factory=list)


def jobs(seed: int, count: int) -> list[Job]:
    """The same requests for the same seed."""
    rng = random.Random(seed)
    return [_job(rng) for _ in range(count)]


def _job(rng: random.Random) -> Job:
    if rng.random() < 0.12:
        path = rng.choice((CHAT, CHAT, TEXT, "/v1/nothing"))
        return Job(path, rng.choice(GARBAGE), sound=False)
    body = _body(rng)
    path = CHAT if "messages" in body else TEXT
    leave = rng.choices(("stay", "after", "before", "half"), (72, 14, 8, 6))[0]
    if leave == "after":
        body |= {"stream": True, "max_tokens": 400}
    lines, wait = rng.randrange(1, 12), rng.choice((0.0, 0.01, 0.1))
    return Job(path, body, leave, lines, wait, sound=leave != "half")


def _body(rng: random.Random) -> dict[str, Any]:
    words = " ".join(rng.choices(WORDS, k=rng.choice((0, 1, 3, 10, 30, 60, 100))))
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 5, 12, 40))}
    if rng.random() < 0.25:
        body["prompt"] = words or "a"
    else:
        messages = [{"role": "user", "content": words}]
        if rng.random() < 0.6:
            messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM)})
        body["messages"] = messages
    if rng.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if rng.random() < 0.1:
        body["seed"] = rng.randrange(1000)
    if rng.random() < 0.3:
        body["temperature"] = rng.random()
    if rng.random() < 0.1:
        body["stop"] = ["boats", "x"]
    if rng.random() < 0.8:
        body["kv"] = _kv(rng)
    return body


def _kv(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.2:
        return {"eviction": "none"}
    budget = rng.choice((1, 8, 20, 48, 64, 500, "10%", "25%", 0.5, "90%", "20KB", "60KB", "10B"))
    name = rng.choice(list(POLICIES))
    kv: dict[str, Any] = {"eviction": name, "budget": budget}
    if rng.random() < 0.4:
        kv["allocation"] = rng.choice(list(ALLOCATIONS))
    if rng.random() < 0.4:
        even = kv.get("allocation") in (None, "uniform", "pyramid")
        kv["store"] = rng.choice(STORES if even else ("auto", "ragged", "union"))
    if rng.random() < 0.3:
        kv["min_tokens"] = rng.choice((0, 32))
    if issubclass(POLICIES[name], WindowPolicy):
        kv["window"] = rng.choice((1, 4, 8))
    if rng.random() < 0.1:
        kv["protect"] = rng.choice(("system", [[0, 3]], "5:9"))
    return kv


# -- clients ---------------------------------------------------------------------------


def send(server: Running, job: Job) -> Outcome:
    """Do a job as its client would."""
    raw = job.body if isinstance(job.body, bytes) else json.dumps(job.body).encode()
    outcome = Outcome(job)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    with contextlib.closing(connection):
        if job.leave == "half":
            connection.putrequest("POST", job.path)
            connection.putheader("Content-Length", str(len(raw)))
            connection.endheaders(raw[: len(raw) // 2])
            _cut(connection)
            return outcome
        connection.request("POST", job.path, raw)
        if job.leave == "before":
            time.sleep(job.wait)
            _cut(connection)
            return outcome
        response = connection.getresponse()
        outcome.status = response.status
        if job.leave == "after" and response.status == 200:
            outcome.raw = b"".join(response.readline() for _ in range(job.lines))
            response.close()
            _cut(connection)
            outcome.status = 0
            return outcome
        outcome.raw = response.read()
    outcome.usages = [part["usage"] for part in parts(outcome.raw) if "usage" in part]
    return outcome


def _cut(connection: http.client.HTTPConnection) -> None:
    """Close at once, with what is unread: the server's next write fails."""
    if connection.sock is not None:
        linger = struct.pack("ii", 1, 0)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


def parts(raw: bytes) -> list[dict[str, Any]]:
    """The JSON objects of an answer or of a stream."""
    if not raw.startswith((b"data: ", b": ")):
        return [json.loads(raw)]
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if line[:6] == b"data: "]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def send_all(server: Running, todo: list[Job], *, clients: int, seconds: float) -> list[Outcome]:
    """Do jobs by some clients at once; those that are not begun in time are left out."""
    stop = time.monotonic() + seconds

    def one(job: Job) -> Outcome | None:
        return send(server, job) if time.monotonic() < stop else None

    with ThreadPoolExecutor(clients) as pool:
        return [outcome for outcome in pool.map(one, todo) if outcome is not None]


@contextlib.contextmanager
def watching(server: Running) -> Iterator[list[str]]:
    """Somebody looks at /v1/kv all the while; what is wrong there."""
    faults: list[str] = []
    over = threading.Event()

    def watch() -> None:
        last: dict[str, Any] = {}
        while not over.wait(0.1):
            code, now = server.get("/v1/kv")
            if code != 200:
                faults.append(f"status {code}")
                continue
            totals = {k: v for k, v in now["totals"].items() if isinstance(v, int)}
            faults.extend(f"{k} fell" for k, v in totals.items() if v < last.get(k, 0))
            last = totals
            if sum(now["requests"]["states"].values()) != len(now["requests"]["live"]):
                faults.append(f"states {now['requests']['states']}")

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield faults
    finally:
        over.set()
        watcher.join()


# -- what is left ----------------------------------------------------------------------


@dataclass(frozen=True)
class Level:
    """What an idle server takes, its prompt cache empty.

    Attributes:
        threads: of the process.
        active: bytes of MLX's live arrays.
        resident: bytes of the process.
        counted: bytes that the prompt cache said it had.
        freed: bytes of arrays that were gone when it was emptied.
    """

    threads: int
    active: int
    resident: int
    counted: int
    freed: int


def level(server: Running) -> Level:
    """Empty the prompt cache and measure.

    mlx-lm's loop holds on to its last response until the next step: let it be a small one.
    """
    settle(server)
    for probe in PROBES:
        server.ask(probe, TEXT)
    settle(server)
    cache = server.responses.prompt_cache
    gc.collect()
    counted, full = cache.nbytes, mx.get_active_memory()
    cache.trim_to(n_sequences=0)
    gc.collect()
    mx.clear_cache()
    active = mx.get_active_memory()
    return Level(threading.active_count(), active, _resident(), counted, full - active)


def settle(server: Running, seconds: float = 60) -> None:
    """Wait until nothing is live and no handler is left."""
    stop = time.monotonic() + seconds
    while server.get("/v1/kv")[1]["requests"]["live"] or _handlers() or _rows_in_flight():
        assert time.monotonic() < stop, (server.get("/v1/kv")[1]["requests"], _handlers())
        time.sleep(0.05)


def _handlers() -> list[str]:
    return [t.name for t in threading.enumerate() if "process_request_thread" in t.name]


def _generators() -> list[EvictingBatchGenerator]:
    return [o for o in gc.get_objects() if type(o) is EvictingBatchGenerator]


def _rows_in_flight() -> int:
    """Requests that batch generators still hold."""
    return sum(
        len(one._unprocessed_sequences) + len(one._prompt_batch) + len(one._generation_batch)
        for one in _generators()
    )


def bytes_in_generators() -> int:
    """Bytes of KV rows that batch generators hold."""
    return sum(one.prompt_cache_nbytes for one in _generators())


def stored(server: Running) -> list[list[Any]]:
    """The layers of each entry of the prompt cache."""
    return [entry.layers for entry in server.responses.prompt_cache]


def _resident() -> int:
    """Bytes of memory that the process has."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    shown = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, check=True, text=True
    )
    return 1024 * int(shown.stdout)
