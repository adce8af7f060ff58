"""Servers in processes of their own, for the time of a benchmark."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvkeep import blas

STARTED_WITHIN = 180.0  # seconds
STOPPED_WITHIN = 20.0
#: mlx-lm's own server with the BLAS that kvkeep would load, and nothing else of kvkeep.
_STOCK = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("fast_blas", {path!r})
module = importlib.util.module_from_spec(spec)
sys.modules["fast_blas"] = module
spec.loader.exec_module(module)
module.load()
from mlx_lm.server import main
main()
"""


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        url: what OpenAI's client takes as `base_url`.
    """

    url: str


def kvkeep_server(
    model: str, flags: Sequence[str] = ()
) -> contextlib.AbstractContextManager[Server]:
    """`kvkeep serve` with these flags."""
    return _running([sys.executable, "-m", "kvkeep", "serve", *_common(model), *flags])


def stock_server(model: str) -> contextlib.AbstractContextManager[Server]:
    """`mlx_lm.server`, on Linux CPUs with the same BLAS."""
    return _running([sys.executable, "-c", _STOCK.format(path=blas.__file__), *_common(model)])


def _common(model: str) -> list[str]:
    return ["--model", model, "--log-level", "WARNING"]


@contextlib.contextmanager
def _running(command: Sequence[str]) -> Iterator[Server]:
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [*command, "--port", str(port)], stdout=output, stderr=subprocess.STDOUT
            )
        try:
            _await(process, f"http://127.0.0.1:{port}/health", log)
            yield Server(f"http://127.0.0.1:{port}/v1")
        finally:
            process.terminate()
            try:
                process.wait(STOPPED_WITHIN)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until the server is healthy; end with its last words where it is not."""
    end = time.monotonic() + STARTED_WITHIN
    while time.monotonic() < end and process.poll() is None:
        if _healthy(url):
            return
        time.sleep(0.1)
    words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
    sys.exit("\n".join(["The server did not start:", *words]))


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
