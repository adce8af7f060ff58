"""A kvkeep server in a thread of the tests, and plain HTTP requests to it."""

from __future__ import annotations

import contextlib
import copy
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.server import APIHandler, ModelProvider, ResponseGenerator

from kvkeep.server import ServerSettings, serve
from kvkeep.server.responses import EvictingResponses

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Running:
    """A server that listens."""

    port: int
    responses: Any

    def send(
        self, body: Any, path: str = CHAT, *, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """POST a body (bytes go out as they are); the status, and what came back."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", path, raw, headers or {})
            return _read(connection.getresponse())

    def headers_of(self, body: Any, path: str = CHAT) -> tuple[int, Any]:
        """Status and headers of the answer to a body."""
        connection = self.open(body, path)
        with contextlib.closing(connection):
            response = connection.getresponse()
            response.read()
            return response.status, response.headers

    def open(self, body: Any, path: str = CHAT) -> http.client.HTTPConnection:
        """A connection that has sent a body, and has read nothing."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, json.dumps(body).encode())
        return connection

    def get(self, path: str, *, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=headers or {})
            return _read(connection.getresponse())

    def ask(self, body: Any, path: str = CHAT) -> Any:
        """The answer to a body that is served."""
        status, answer = self.send(body, path)
        assert status == 200, answer
        return answer

    def ask_together(self, bodies: list[Any]) -> list[Any]:
        """The answers to bodies that are sent at once, each by a client of its own."""
        with self.gathered(len(bodies)), ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(self.ask, bodies))

    @contextlib.contextmanager
    def gathered(self, count: int) -> Iterator[None]:
        """The generation thread takes up no request before so many wait, but for one that it
        was already waiting for itself."""
        take, waiting = self.responses._next_request, self.responses.requests
        there, end = threading.Event(), time.monotonic() + 10

        def when_all_wait(timeout: float | None = None) -> Any:
            here = waiting.qsize() + len(self.responses.admission)
            if not there.is_set() and here < count - 1 and time.monotonic() < end:
                time.sleep(0.01)
                return None
            there.set()
            return take(timeout)

        self.responses._next_request = when_all_wait
        try:
            yield
        finally:
            self.responses._next_request = take

    def refused(self, body: Any, path: str = CHAT, **kwargs: Any) -> tuple[int, dict[str, Any]]:
        """Status and error of a body that is refused in OpenAI's shape."""
        status, answer = self.send(body, path, **kwargs)
        assert set(answer) == {"error"}
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        return status, answer["error"]


def _read(response: http.client.HTTPResponse) -> tuple[int, Any]:
    raw = response.read().decode()
    if not response.headers["Content-type"].startswith("text/event-stream"):
        return response.status, json.loads(raw)
    events = [part.removeprefix("data: ") for part in raw.split("\n\n") if part[:6] == "data: "]
    return response.status, [event if event == "[DONE]" else json.loads(event) for event in events]


@contextlib.contextmanager
def running(folder: str, *flags: str, **settings: Any) -> Iterator[Running]:
    """A kvkeep server for the time of the block; its threads have ended afterwards."""
    listening = threading.Event()
    made: list[tuple[ThreadingHTTPServer, EvictingResponses]] = []

    def started(server: ThreadingHTTPServer, responses: EvictingResponses) -> None:
        made.append((server, responses))
        listening.set()

    argv = ["--model", folder, "--port", "0", "--log-level", "ERROR", *flags]
    thread = threading.Thread(
        target=serve, args=(argv, ServerSettings(**settings)), kwargs={"started": started}
    )
    thread.start()
    try:
        assert listening.wait(60)
        yield Running(made[0][0].server_port, made[0][1])
    finally:
        for server, _ in made:
            server.shutdown()
        thread.join(60)
        assert not thread.is_alive()
        assert not any(responses.generation_available() for _, responses in made)


@contextlib.contextmanager
def running_stock(like: Running) -> Iterator[Running]:
    """mlx-lm's own server, with the flags of another."""
    args = copy.copy(like.responses.cli_args)
    responses = StockResponses(ModelProvider(args), LRUPromptCache(args.prompt_cache_size))
    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *a, **k: APIHandler(responses, *a, **k))
    thread = threading.Thread(target=server.serve_forever, args=(0.1,))
    thread.start()
    try:
        yield Running(server.server_port, responses)
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()
        responses.stop_and_join()


class StockResponses(ResponseGenerator):
    """mlx-lm's own, but that its thread leaves no stream behind, which would abort pytest."""

    def _run_generate(self) -> None:
        super()._run_generate()
        mx.clear_streams()


def eventually(probe: Callable[[], Any], seconds: float = 20) -> Any:
    """What a probe gives once it is true."""
    stop = time.monotonic() + seconds
    while not (value := probe()):
        assert time.monotonic() < stop, "it did not come about"
        time.sleep(0.02)
    return value


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    """A greedy chat body: a system message where two texts are given, and the user's."""
    roles = ("system", "user")[-len(texts) :]
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
    return {"messages": messages, "max_tokens": 24, **fields}


def text_of(answer: Any) -> str:
    """What a chat answer says, streamed or not."""
    if isinstance(answer, dict):
        return answer["choices"][0]["message"]["content"]
    deltas = [e["choices"][0]["delta"] for e in answer if e != "[DONE]" and e["choices"]]
    return "".join(delta.get("content", "") for delta in deltas)


def usage_of(answer: Any) -> dict[str, Any]:
    """The usage of an answer, streamed or not."""
    if isinstance(answer, dict):
        return answer["usage"]
    (usage,) = [event["usage"] for event in answer if "usage" in event]
    return usage
