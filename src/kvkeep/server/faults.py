"""Faults as OpenAI's clients read them: a status and {"error": {message, type, param, code}}."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from kvkeep.errors import KvkeepError

_NO_MEMORY = re.compile(r"alloc|out of memory|insufficient memory", re.IGNORECASE)
_CODES = {401: "invalid_api_key", 403: "not_allowed", 404: "not_found", 413: "too_large"}


class RequestError(KvkeepError):
    """A request is refused.

    Args:
        problem: one sentence.
        param: the field at fault, as "kv.budget".
        status: HTTP status, 400 unless said otherwise.
        code: short name of the fault.
        expected, received, remedy: as in `KvkeepError`.
        retry_after: seconds after which it is worth another try.
    """

    def __init__(
        self,
        problem: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        expected: str | None = None,
        received: object = None,
        remedy: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(problem, expected=expected, received=received, remedy=remedy)
        self.param = param
        self.status = status
        self.code = code
        self.retry_after = retry_after


class ClientGone(ConnectionError):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class Fault:
    """What a client is told. `message` is None where mlx-lm's own answer says it."""

    status: int
    message: str | None
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    @property
    def reason(self) -> str:
        """Short name of the fault, which holds nothing that a client wrote."""
        return self.code or _CODES.get(self.status) or self._kind

    @property
    def _kind(self) -> str:
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self, said: bytes = b"") -> bytes:
        """The JSON body; `said` is what mlx-lm would have answered."""
        message = self.message or _text_of(said) or HTTPStatus(self.status).phrase
        error: dict[str, Any] = {
            "message": message,
            "type": self._kind,
            "param": self.param,
            "code": self.code or _CODES.get(self.status),
        }
        return json.dumps({"error": error}).encode()


def fault_of(error: BaseException | None, status: int) -> Fault:
    """The fault that an error means; `status` where the error itself does not say it."""
    if isinstance(error, RequestError):
        return Fault(error.status, str(error), error.param, error.code, error.retry_after)
    if isinstance(error, KvkeepError):
        return Fault(400, str(error))
    if is_out_of_memory(error):
        return fault_of(no_memory(), status)
    return Fault(status, None if error is None else str(error) or type(error).__name__)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether MLX or Python could not allocate. MLX raises a RuntimeError of its allocator's
    words, which differ by backend."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def no_memory() -> RequestError:
    """The refusal of a request for which memory could not be allocated."""
    return RequestError(
        "there was no memory for this request",
        status=503,
        code="out_of_memory",
        remedy="Try again later, shorten the prompt, or bound the server with --kv-memory.",
        retry_after=10,
    )


class FaultWriter:
    """Stands in for a handler's `wfile`: whatever is written, the fault's body is sent."""

    def __init__(self, wfile: Any, fault: Fault) -> None:
        self._wfile = wfile
        self._fault = fault

    def write(self, said: bytes) -> int:
        """Send the fault in place of `said`."""
        return self._wfile.write(self._fault.body(said))

    def flush(self) -> None:
        """Flush the handler's own file."""
        self._wfile.flush()


def _text_of(said: bytes) -> str | None:
    text = said.decode(errors="replace")
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text or None
