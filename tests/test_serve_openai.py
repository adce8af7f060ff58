"""The server asked by OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from serving import Running, running
from tiny_folder import write_tiny_folder

openai = pytest.importorskip("openai", reason="OpenAI's client comes with the extra dev")
pytestmark = pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")

KV: list[dict[str, Any]] = [
    {"eviction": "snapkv", "budget": 48, "window": 8},
    {"eviction": "none"},
    {"budget": "40%"},
    {"eviction": "keydiff", "budget": 64},
    {"eviction": "snapkv", "allocation": "adaptive", "budget": 60},
    {"eviction": "tova", "budget": 50, "store": "shared"},
    {"budget": 70, "protect": "system"},
    {"eviction": "snapkv", "allocation": "adaptive", "store": "union", "budget": 56},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("openai") / "model", endless=True))


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[Running]:
    with running(folder, model="tiny", api_key="secret") as server:
        yield server


def client_of(server: Running, key: str = "secret") -> Any:
    url = f"http://127.0.0.1:{server.port}/v1"
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)


def streamed(server: Running, which: int) -> tuple[str, dict[str, Any]]:
    """Text and `usage.kv` of a streamed answer, each by a client of its own."""
    words = " ".join(f"Ship {i * which} left port {i % 9}." for i in range(10 + which))
    with client_of(server) as client:
        events = client.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "system", "content": f"You are number {which}."},
                {"role": "user", "content": words},
            ],
            max_tokens=50,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"kv": KV[which]},
        )
        text, usage = "", None
        for event in events:
            text += "".join(choice.delta.content or "" for choice in event.choices)
            usage = event.usage or usage
    assert usage is not None
    report = dict(usage.kv)
    report.pop("compact_ms")
    report.pop("reuse")
    return text, report


def test_eight_streams_at_once_are_those_of_each_alone(folder: str, server: Running) -> None:
    with server.gathered(8), ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda which: streamed(server, which), range(8)))
    with running(folder, model="tiny", api_key="secret") as fresh:
        alone = [streamed(fresh, which) for which in range(8)]
    assert together == alone
    assert [report["evicted"] for _, report in alone] == [kv != KV[1] for kv in KV]
    assert all(len(text) > 10 for text, _ in alone)


def test_faults_are_the_clients_own_exceptions(server: Running) -> None:
    def ask(key: str = "secret", model: str = "tiny", **extra: Any) -> Any:
        with client_of(server, key) as client:
            return client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "Hello"}],
                max_tokens=3,
                extra_body=extra,
            )

    assert ask(kv={"budget": 9}).usage.kv["policy"] == "span"
    with pytest.raises(openai.BadRequestError, match="unknown eviction setting") as bad:
        ask(kv={"budgt": 9})
    assert (bad.value.param, bad.value.type) == ("kv.budgt", "invalid_request_error")
    with pytest.raises(openai.AuthenticationError):
        ask(key="wrong")
    with pytest.raises(openai.NotFoundError, match="no model of that name"):
        ask(model="gpt-4o")
    with pytest.raises(openai.PermissionDeniedError):
        ask(adapters="/etc")


def test_a_failure_in_the_middle_of_a_stream_is_raised(server: Running) -> None:
    with client_of(server) as client, pytest.raises(openai.APIError, match="holds no row"):
        list(
            client.completions.create(
                model="tiny",
                prompt="Too little for this prompt. " * 9,
                stream=True,
                extra_body={"kv": {"budget": "10B"}},
            )
        )


def test_models_are_listed(server: Running) -> None:
    with client_of(server) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
