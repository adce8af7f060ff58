"""SIGTERM: no new requests, and time for those that are live to be answered."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from types import FrameType

from kvkeep.server.responses import EvictingResponses

_PAUSE = 0.05
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def draining(
    responses: EvictingResponses, seconds: float
) -> Iterator[Callable[[ThreadingHTTPServer], None]]:
    """Let a SIGTERM end the HTTP server, and leave the block once live requests are answered.

    A second SIGTERM ends the process at once. Outside of the main thread, where Python takes
    no signals, nothing is changed.

    Args:
        seconds: how long live requests may go on.

    Yields:
        What to call with the HTTP server once it listens.
    """
    servers: list[ThreadingHTTPServer] = []
    asked = threading.Event()

    def close(server: ThreadingHTTPServer) -> None:
        # shutdown() waits for the loop that the signal interrupts.
        threading.Thread(target=server.shutdown, daemon=True).start()

    def listening(server: ThreadingHTTPServer) -> None:
        servers.append(server)
        if asked.is_set():
            close(server)

    def end(_: int, __: FrameType | None) -> None:
        asked.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for server in servers:
            close(server)

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, end) if main else None
    try:
        yield listening
        if asked.is_set():
            _wait_for_answers(responses, seconds)
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


def _wait_for_answers(responses: EvictingResponses, seconds: float) -> None:
    stop = time.monotonic() + seconds
    live = len(responses.monitor.snapshot().live)
    _log.info("SIGTERM: %d requests have %g s to end", live, seconds)
    while live and responses.generation_available() and time.monotonic() < stop:
        time.sleep(_PAUSE)
        live = len(responses.monitor.snapshot().live)
    if live:
        _log.warning("SIGTERM: %d requests are cut off", live)
