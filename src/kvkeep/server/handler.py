"""mlx-lm's HTTP handler with `kv` in requests, `usage.kv` in answers, and its doors guarded."""

from __future__ import annotations

import hmac
import io
import json
import logging
import re
import select
import socket
import sys
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from mlx_lm.server import APIHandler, CompletionRequest

from kvkeep.server.bodies import check_body, read_body
from kvkeep.server.faults import ClientGone, Fault, FaultWriter, RequestError, fault_of
from kvkeep.server.models import DEFAULT, require_allowed
from kvkeep.server.monitor import Entry
from kvkeep.server.responses import EvictingResponses, PlannedRequest
from kvkeep.server.seeing import is_open, is_seen, sight_of
from kvkeep.server.settings import PROTECT_SYSTEM, KvRequest, ServerSettings, parse_kv

_log = logging.getLogger(__name__)
_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_ENDPOINTS = {_CHAT: _CHAT, "/chat/completions": _CHAT, _TEXT: _TEXT}
_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_LEFT = 499  # as web servers log a client that left before its answer
_CHUNK = 2**16
_DIGITS = 18  # of a length that fits an integer of the machine


class EvictingHandler(APIHandler):
    """An `APIHandler` that answers every fault in OpenAI's shape."""

    response_generator: EvictingResponses
    kv: KvRequest
    timeout = 120  # seconds that a client may neither send nor read
    stream = False
    _fault: Fault | None = None
    _sent = False  # whether the headers are with the client
    _id: str | None = None
    _entry: Entry
    _status = 0
    _left = False  # whether the client went away

    @property
    def settings(self) -> ServerSettings:
        """What the server was started with."""
        return self.response_generator.settings

    # -- requests ----------------------------------------------------------------------

    def do_GET(self) -> None:
        """Answer a GET as mlx-lm does, or show the server; few paths need no key."""
        path = urlsplit(self.path).path
        if is_seen(path):
            self._answering(lambda: self._show(path), guarded=not is_open(path))
        else:
            self._answering(super().do_GET, guarded=self.path != "/health")

    def do_POST(self) -> None:
        """Answer a POST as mlx-lm does, once its body is known to be sound."""
        self._id, self._status, self._left = self._own_or_new_id(), 0, False
        kind = _ENDPOINTS.get(self.path, "other")
        self._entry = self.response_generator.monitor.begin(self._id, kind=kind)
        try:
            self._answering(self._post, guarded=True)
        finally:
            self._entry.finished(*self._outcome())

    def _outcome(self) -> tuple[int, str]:
        """Status and reason of a request that has ended."""
        if self._fault is not None:
            return self._fault.status, self._fault.reason
        if self._left:
            return _LEFT, "disconnect"
        return self._status, self._entry.reason or "other"

    def _post(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            if length.startswith("-"):
                raise RequestError("bad Content-Length", received=length)
            super().do_POST()  # missing or unreadable: mlx-lm answers before it reads
            return
        raw = self._read(int(length) if len(length) <= _DIGITS else sys.maxsize)
        body = read_body(raw)
        check_body(body)
        require_allowed(body, self.response_generator.cli_args, self.settings)
        kv = body.get("kv")
        self.kv = parse_kv(kv, self.settings)
        self.kv.entry, config = self._entry, self.kv.config
        policy, budget = (config.policy, str(config.budget)) if config else (None, None)
        self._entry.asks(policy, budget, stream=body.get("stream") is True)
        if self.path == _TEXT and kv and kv.get("protect") == PROTECT_SYSTEM:
            raise RequestError(
                "a text completion has no system prompt",
                param="kv.protect",
                expected="position ranges",
            )
        rest, self.rfile = self.rfile, io.BytesIO(raw)
        try:
            super().do_POST()
        finally:
            self.rfile = rest

    def _answering(self, answer: Callable[[], None], *, guarded: bool) -> None:
        out = self.wfile
        self._sent, self._fault = False, None
        try:
            if guarded:
                self._require_key()
            answer()
        except (ConnectionError, TimeoutError):
            self._leave()
        except Exception as error:
            self.wfile = out
            try:
                self._fail(error)
            except (ConnectionError, TimeoutError):
                self._leave()
        finally:
            self.wfile = out

    def _leave(self) -> None:
        self.close_connection = self._left = True
        _log.debug("The client is gone")

    def _require_key(self) -> None:
        key = self.settings.api_key
        if key is None:
            return
        given = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), key.encode()):
            raise RequestError("missing or wrong API key", status=401, code="invalid_api_key")

    def _read(self, length: int) -> bytes:
        most = self.settings.max_body_bytes
        if length <= most:
            return self.rfile.read(length)
        left = min(length, 2 * most)  # most clients read an answer only once all is sent
        while left > 0 and (chunk := self.rfile.read(min(left, _CHUNK))):
            left -= len(chunk)
        raise RequestError(
            "the body is too large", status=413, expected=f"at most {most} bytes", received=length
        )

    def validate_model_parameters(self) -> None:
        """Check mlx-lm's fields; its complaint becomes a fault that names no thread's end.

        Raises:
            RequestError: a field has the wrong type or is out of range.
        """
        if self.stream_options is not None:
            self.stream_options.setdefault("include_usage", False)
        try:
            super().validate_model_parameters()
        except (ValueError, TypeError, OverflowError) as error:
            name = str(error).partition(" ")[0]
            param = name if name in vars(self) else None
            raise RequestError(str(error), param=_SPELLED.get(name, param)) from error

    def handle_completion(self, request: CompletionRequest, stop_words: list[str]) -> None:
        """Answer a completion; the request carries what it asks of its cache."""
        self.kv.is_there = self._client_is_there
        try:
            super().handle_completion(PlannedRequest(**vars(request), kv=self.kv), stop_words)
        finally:
            self.kv.ended = True

    def _client_is_there(self) -> bool:
        """Whether the client's side of the connection is open. It has sent all it had to."""
        ready = select.poll()
        try:
            ready.register(self.connection, select.POLLIN)
            return not ready.poll(0) or self.connection.recv(1, socket.MSG_PEEK) != b""
        except (OSError, ValueError):
            return False

    def handle_models_request(self) -> None:
        """List the models that a request may name."""
        if self.settings.allow_model_paths:
            super().handle_models_request()
            return
        name = self.settings.model or self.response_generator.cli_args.model or DEFAULT
        models = [{"id": name, "object": "model", "created": self.created}]
        self._set_completion_headers(200)
        self.end_headers()
        self.wfile.write(json.dumps({"object": "list", "data": models}).encode())

    def _show(self, path: str) -> None:
        watched = self.response_generator
        sight = sight_of(path, self.headers.get("Accept", ""), watched.monitor, watched.metrics)
        self.send_response(200)
        self.send_header("Content-Type", sight.content_type)
        self.send_header("Content-Length", str(len(sight.body)))
        for name, value in sight.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(sight.body)

    def _own_or_new_id(self) -> str:
        """The client's X-Request-Id, where it is one that a log can take."""
        given = self.headers.get("X-Request-Id", "")
        return given if _ID.fullmatch(given) else uuid.uuid4().hex

    # -- answers -----------------------------------------------------------------------

    def generate_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """One packet of the answer, with `usage.kv` where it has a usage."""
        return self._with_kv(super().generate_response(*args, **kwargs))

    def completion_usage_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The last packet of a stream, with `usage.kv`."""
        return self._with_kv(super().completion_usage_response(*args, **kwargs))

    def _with_kv(self, response: dict[str, Any]) -> dict[str, Any]:
        if self.kv.failure is not None:
            raise self.kv.failure
        if self.kv.report is not None and "usage" in response:
            response["usage"]["kv"] = self.kv.report
        return response

    # -- faults ------------------------------------------------------------------------

    def send_response(self, code: int, message: str | None = None) -> None:
        """Begin an answer; it carries the request's id."""
        super().send_response(code, message)
        self._status = code
        if self._id is not None:
            self.send_header("X-Request-Id", self._id)

    def log_message(self, format: str, *args: Any) -> None:
        """mlx-lm's access lines: for debugging, since each request has a line of its own."""
        _log.debug("%s %r", self.address_string(), format % args)

    def _set_completion_headers(self, status_code: int = 200) -> None:
        self._fault = None
        if status_code >= 400:
            # mlx-lm calls this while it handles the error, and answers 404 to most of them.
            self._fault = self._fault_of(sys.exception(), status_code)
            status_code = self._fault.status
        super()._set_completion_headers(status_code)
        if self._fault is not None and self._fault.retry_after is not None:
            self.send_header("Retry-After", str(self._fault.retry_after))

    def end_headers(self) -> None:
        """Send the headers; after those of a fault, its body goes out whatever is written."""
        super().end_headers()
        self._sent = True
        if self._fault is not None:
            self.wfile = FaultWriter(self.wfile, self._fault)  # type: ignore[assignment]

    def _fault_of(self, error: BaseException | None, status: int) -> Fault:
        if isinstance(error, ClientGone):
            raise error
        if not self.response_generator.is_healthy:
            return Fault(503, "the server's generation thread has ended")
        return fault_of(error, status)

    def _fail(self, error: Exception) -> None:
        """Tell the client of an error that came after mlx-lm's own checks."""
        fault = self._fault = self._fault_of(error, 500)
        if fault.status >= 500 and fault.status != 503:  # memory is short: no fault of ours
            _log.exception("A request failed")
        if not self._sent:
            self._headers_buffer: list[bytes] = []
            super()._set_completion_headers(fault.status)
            if fault.retry_after is not None:
                self.send_header("Retry-After", str(fault.retry_after))
            super().end_headers()
            self.wfile.write(fault.body())
        elif self.stream:
            self.wfile.write(b"data: " + fault.body() + b"\n\n")


# mlx-lm's attributes that are not called as the field is.
_SPELLED = {"requested_model": "model", "adapter": "adapters"}
