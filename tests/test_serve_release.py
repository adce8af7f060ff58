"""Rows that nobody accounts for are gone: MLX's live bytes are those of the books."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from kvkeep.server import batching
from serving import CHAT, TEXT, Running, chat, eventually, running
from test_serve_seeing import status, streaming
from tiny_folder import write_tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")

PROMPT = "boats and gulls " * 250  # 4000 rows of 1024 bytes
SMALL = {"eviction": "snapkv", "budget": 64}
SPARE = 400_000  # of buffers and of what a step computes; a prompt's rows are ten times that


@pytest.fixture
def server(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    step = batching.EvictingBatchGenerator._next

    def slowly(self: Any) -> Any:
        time.sleep(0.01)
        return step(self)

    monkeypatch.setattr(batching.EvictingBatchGenerator, "_next", slowly)
    with running(str(write_tiny_folder(tmp_path / "model", endless=True))) as server:
        yield server


def unaccounted(server: Running) -> int:
    """Live bytes beyond the weights, the requests in flight and the prompt cache."""
    gc.collect()
    model: Any = server.responses.model_provider.model
    weights = sum(array.nbytes for array in _arrays(model.parameters()))
    booked = sum(status(server)["in_flight"].values()) + server.responses.prompt_cache.nbytes
    return mx.get_active_memory() - weights - booked


def _arrays(tree: Any) -> Iterator[mx.array]:
    if isinstance(tree, mx.array):
        yield tree
    else:
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _arrays(part)


def idle(server: Running) -> bool:
    return not status(server)["requests"]["live"]


@pytest.mark.parametrize("alone", [{}, {"seed": 1}], ids=["batch", "single"])
def test_a_prefix_that_the_cache_lets_go_is_gone(server: Running, alone: dict[str, int]) -> None:
    cache = server.responses.prompt_cache
    first = {"prompt": PROMPT, "max_tokens": 1, "kv": {"eviction": "none"}, **alone}
    server.ask(first, TEXT)
    body = chat(PROMPT, kv=SMALL, stream=True, max_tokens=3000, **alone)
    server.ask({**body, "stream": False, "max_tokens": 1}, CHAT)  # leaves exact rows to take
    assert cache.nbytes > 2 * SPARE
    with streaming(server, body):
        eventually(lambda: status(server)["in_flight"]["compact"])
        assert status(server)["requests"]["live"][0]["reused_tokens"] > 3000
        cache.trim_to(n_sequences=0)
        eventually(lambda: unaccounted(server) < SPARE)
    eventually(lambda: idle(server))
    cache.trim_to(n_sequences=0)
    eventually(lambda: unaccounted(server) < SPARE)


def test_what_ended_is_gone_before_the_next_request(server: Running) -> None:
    cache = server.responses.prompt_cache
    for kv in ({"eviction": "none"}, SMALL):
        server.ask(chat(PROMPT, kv=kv, max_tokens=3))
        eventually(lambda: idle(server))
        eventually(lambda: unaccounted(server) < SPARE)
        cache.trim_to(n_sequences=0)
        eventually(lambda: unaccounted(server) < SPARE)
