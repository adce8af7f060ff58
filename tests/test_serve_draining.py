"""SIGTERM, to a server in a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tiny_folder import write_tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("drained") / "model", endless=True))


class Server:
    """`kvkeep serve` as a user starts it, and its log."""

    def __init__(self, folder: str, *flags: str) -> None:
        argv = ["-m", "kvkeep", "serve", "--model", folder, "--port", "0", *flags]
        self.process = subprocess.Popen(
            [sys.executable, *argv], stderr=subprocess.PIPE, text=True, env={**os.environ}
        )
        self.log: list[str] = []
        self.port = 0
        self.connections: list[Any] = []
        ready = threading.Event()
        self.reader = threading.Thread(target=self._read, args=(ready,), daemon=True)
        self.reader.start()
        assert ready.wait(120), self.log

    def _read(self, ready: threading.Event) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"Ready on .*:(\d+)", line):
                self.port = int(found[1])
                ready.set()

    def stream(self, max_tokens: int) -> http.client.HTTPResponse:
        """A streamed answer whose first token is there."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        self.connections.append(connection)
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "Count the boats. " * 20}],
            "max_tokens": max_tokens,
            "stream": True,
            "kv": {"eviction": "snapkv", "budget": 64},
        }
        connection.request("POST", "/v1/chat/completions", json.dumps(body).encode())
        response = connection.getresponse()
        self.connections.append(response)
        while b"data: " not in response.readline():
            pass
        return response

    def ended(self) -> int:
        code = self.process.wait(60)
        self.reader.join(10)
        return code


@contextlib.contextmanager
def serving(folder: str, *flags: str) -> Iterator[Server]:
    server = Server(folder, *flags)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        server.reader.join(10)
        for connection in server.connections:
            connection.close()
        if server.process.stderr is not None:
            server.process.stderr.close()


def test_live_requests_are_answered_and_no_new_ones_taken(folder: str) -> None:
    with serving(folder, "--drain-seconds", "60") as server:
        response = server.stream(1500)
        server.process.send_signal(signal.SIGTERM)
        rest = response.read().decode()
        assert rest.rstrip().endswith("data: [DONE]")
        assert rest.count("data: ") > 100
        assert server.ended() == 0
        with pytest.raises(ConnectionError):
            server.stream(1)
        assert any("SIGTERM: 1 requests have 60 s to end" in line for line in server.log)
        assert not any("Traceback" in line for line in server.log)


def test_the_time_to_drain_is_bounded(folder: str) -> None:
    with serving(folder, "--drain-seconds", "0.2") as server:
        response = server.stream(10**6)
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0
        assert any("1 requests are cut off" in line for line in server.log)
        assert "[DONE]" not in response.read().decode()


def test_an_idle_server_ends_at_once_and_a_second_signal_ends_any(folder: str) -> None:
    with serving(folder) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0
    with serving(folder, "--drain-seconds", "600") as server:
        response = server.stream(10**6)
        server.process.send_signal(signal.SIGTERM)
        while not any("SIGTERM" in line for line in server.log):
            response.readline()
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == -signal.SIGTERM
