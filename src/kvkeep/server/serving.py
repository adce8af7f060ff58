"""Start mlx-lm's server with our generator, prompt cache and handler in place of its own."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http.server import ThreadingHTTPServer
from typing import Any

import mlx.core as mx
import mlx_lm.server as mlx_server
from mlx_lm.server import ModelProvider

from kvkeep.errors import ConfigError
from kvkeep.server import single
from kvkeep.server.batching import EvictingBatchGenerator
from kvkeep.server.draining import draining
from kvkeep.server.handler import EvictingHandler
from kvkeep.server.logs import write_json
from kvkeep.server.prompt_cache import ServerPromptCache
from kvkeep.server.responses import EvictingResponses
from kvkeep.server.settings import ServerSettings

_starting = threading.Lock()
Started = Callable[[ThreadingHTTPServer, EvictingResponses], None]


def serve(argv: Sequence[str], settings: ServerSettings, *, started: Started | None = None) -> None:
    """Serve until the process is interrupted or the HTTP server is shut down.

    Args:
        argv: flags of mlx_lm.server, read by its own parser.
        settings: what we add to them.
        started: called with the HTTP server and the generator once the socket listens.

    Raises:
        ConfigError: no model is given and none may be named, it does not load, or eviction
            or --kv-memory is on under mlx.launch.
    """
    host, port, provider = mlx_arguments(argv)
    if settings.log_json:
        write_json()
    group = mx.distributed.init()
    if group.size() > 1 and (settings.evicting or settings.kv_memory is not None):
        raise ConfigError(
            "neither eviction nor --kv-memory runs under mlx.launch",
            expected="one process, or --kv-eviction none and no --kv-memory",
            received=f"{group.size()} processes",
        )
    if provider.cli_args.model is None and not settings.allow_model_paths:
        raise ConfigError(
            "there is no model to serve",
            expected="--model, or --allow-model-paths to let requests name one",
        )
    _join()
    cache = ServerPromptCache(
        provider.cli_args.prompt_cache_size,
        provider.cli_args.prompt_cache_bytes,
        keep_compact=settings.keep_compact,
    )
    responses = EvictingResponses(provider, cache, settings)
    monitor = responses.monitor
    monitor.prompt_cache = cache.by_kind
    monitor.in_flight = lambda: responses.governor.live
    monitor.limits = {
        "kv_memory": settings.kv_memory,
        "prompt_cache_bytes": provider.cli_args.prompt_cache_bytes,
    }
    try:
        _wait_for_model(responses, provider)
        if group.rank() == 0:
            with draining(responses, settings.drain_seconds) as on_listening:
                mlx_server._run_http_server(
                    host,
                    port,
                    responses,
                    server_class=_server_class(responses, on_listening, started),
                    handler_class=EvictingHandler,
                )
        else:
            responses.join()
    finally:
        responses.stop_and_join()


def mlx_arguments(argv: Sequence[str]) -> tuple[str, int, ModelProvider]:
    """Host, port and model provider, as `mlx_lm.server.main` makes them of its flags."""
    found: list[tuple[str, int, ModelProvider]] = []

    def keep(host: str, port: int, model_provider: ModelProvider, **_: Any) -> None:
        found.append((host, port, model_provider))

    with _starting:
        run, old = mlx_server.run, sys.argv
        mlx_server.run, sys.argv = keep, ["kvkeep serve", *argv]
        try:
            mlx_server.main()
        finally:
            mlx_server.run, sys.argv = run, old
    return found[0]


def _join() -> None:
    """Put our names in place of mlx-lm's in its server's module. Idempotent.

    They stay: in threads that planned no request they are mlx-lm's own.
    """
    mlx_server.BatchGenerator = EvictingBatchGenerator  # type: ignore[misc]
    mlx_server.stream_generate = single.stream_generate  # type: ignore[reportPrivateImportUsage]


def _wait_for_model(responses: EvictingResponses, provider: ModelProvider) -> None:
    """Listen only once the model is there: whoever can connect is answered."""
    if provider.cli_args.model is None:
        return
    while provider.model_key is None:
        if not responses.is_healthy:
            raise ConfigError(
                f"--model {provider.cli_args.model} does not load",
                remedy="The log above says why.",
            )
        time.sleep(0.02)


def _server_class(
    responses: EvictingResponses,
    listening: Callable[[ThreadingHTTPServer], None],
    started: Started | None,
) -> type[ThreadingHTTPServer]:
    class Server(ThreadingHTTPServer):
        """Closes its socket when it ends."""

        def serve_forever(self, poll_interval: float = 0.1) -> None:
            logging.getLogger(__name__).info("Ready on %s:%d", *self.server_address[:2])
            listening(self)
            if started is not None:
                started(self, responses)
            try:
                super().serve_forever(poll_interval)
            finally:
                self.server_close()

    return Server
