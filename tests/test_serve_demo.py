"""The server on a real model, asked by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx_lm.server as mlx_server
import pytest

from kvkeep.caches import live_nbytes
from kvkeep.demo_model import resolve_model
from kvkeep.generation import RECOMMENDED
from kvkeep.haystack import library_prose
from kvkeep.server import batching
from serving import Running, running

openai = pytest.importorskip("openai", reason="OpenAI's client comes with the extra dev")
pytestmark = [
    pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended"),
    pytest.mark.demo_model,
]

KV: list[dict[str, Any]] = [
    {},
    {"eviction": "none"},
    {"budget": "40%"},
    {"eviction": "snapkv", "budget": 100},
    {"allocation": "adaptive"},
    {"eviction": "keydiff", "budget": "50%"},
    {"protect": "system"},
    {"eviction": "snapkv", "allocation": "adaptive", "store": "union", "budget": "30%"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "open_store",
        "description": "Open a store with its code.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}},
    },
}
CALL = {"name": "open_store", "arguments": {"code": "7305918"}}
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for tool_call in message.tool_calls or [] %}<tool_call>{{ tool_call.name }}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(demo_model: Any) -> str:
    return str(resolve_model("demo"))


def serving(folder: str, *flags: str, **settings: Any) -> Any:
    return running(folder, *flags, config=RECOMMENDED, evicting=True, model="demo", **settings)


def client_of(server: Running) -> Any:
    url = f"http://127.0.0.1:{server.port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=600)


def document(which: int, words: int = 120) -> str:
    """Prose with a fact in it."""
    sentences = (sentence for sentence, _ in library_prose().sentences(which))
    text = " ".join(islice(sentences, 40)).split()[:words]
    fact = f"The access code of store {which} is {7305918 + 1111 * which}."
    return " ".join([*text[: words // 3], fact, *text[words // 3 :]])


def asked(
    server: Running, messages: list[Any], *, max_tokens: int = 20, kv: Any = None, **more: Any
) -> tuple[str, dict[str, Any]]:
    """Text and `usage.kv` of a streamed answer, by a client of its own."""
    with client_of(server) as client:
        events = client.chat.completions.create(
            model="demo",
            messages=messages,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"kv": kv} if kv else {},
            **more,
        )
        text, usage = "", None
        for event in events:
            text += "".join(choice.delta.content or "" for choice in event.choices)
            usage = event.usage or usage
    assert usage is not None
    return text, dict(usage.kv)


def body(which: int) -> list[dict[str, str]]:
    question = f"{document(which)}\n\nWhat is the access code of store {which}?"
    return [
        {"role": "system", "content": f"You are clerk {which}. Be brief."},
        {"role": "user", "content": question},
    ]


@pytest.mark.slow
def test_eight_streams_at_once_answer_as_alone(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live: dict[int, int] = {}
    compact = batching.compact_asked

    def measured(model: Any, tokens: list[int], cache: list[Any], plan: Any) -> None:
        compact(model, tokens, cache, plan)
        mx.eval([layer.state for layer in cache])
        live[len(tokens)] = sum(live_nbytes(layer) for layer in cache)

    monkeypatch.setattr(batching, "compact_asked", measured)
    with serving(folder) as server, server.gathered(8), ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda i: asked(server, body(i), kv=KV[i]), range(8)))
    at_once = dict(live)
    with serving(folder, "--prompt-cache-size", "1") as server:
        alone = [asked(server, body(i), kv=KV[i]) for i in range(8)]
    for i, ((text, kv), (expected, kv_alone)) in enumerate(zip(together, alone, strict=True)):
        assert text == expected
        assert kv["compact_bytes"] == kv_alone["compact_bytes"]
        assert kv["compact_bytes"] == at_once[kv["prompt_tokens"] - 1]
        assert kv["evicted"] == (i != 1)
    assert sum(str(7305918 + 1111 * i) in text for i, (text, _) in enumerate(alone)) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("keep_compact", [False, True], ids=["exact", "compact"])
def test_four_turns(folder: str, keep_compact: bool) -> None:
    code = str(7305918 + 3333)
    messages = body(3)
    with serving(folder, keep_compact=keep_compact) as server:
        kinds = []
        for question in ("Say the code of store 3 again.", "Is it a number?", "Which store?", ""):
            text, kv = asked(server, messages, kv={"budget": "50%"})
            kinds.append(kv["reuse"]["kind"])
            assert kv["evicted"] and kv["retained_tokens"] < 0.6 * kv["prompt_tokens"]
            if len(kinds) <= 2:
                assert code in text
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": question},
            ]
    assert kinds == ["none", *["compact" if keep_compact else "exact"] * 3]


@pytest.mark.slow
def test_two_users_share_a_document(folder: str) -> None:
    system = {"role": "system", "content": document(5) + " " + document(6)}
    users = [
        [system, {"role": "user", "content": f"What is the access code of store {i}?"}]
        for i in (5, 6)
    ]
    with serving(folder, keep_compact=True) as server:
        first, second = (asked(server, messages) for messages in users)
        exact = {"eviction": "none"}
        plain = [asked(server, messages, kv=exact) for messages in users]
    assert [first[1]["reuse"]["kind"], second[1]["reuse"]["kind"]] == ["none", "exact"]
    assert second[1]["reuse"]["tokens"] > 0.8 * second[1]["prompt_tokens"]
    for (text, _), (expected, _), i in zip((first, second), plain, (5, 6), strict=True):
        code = str(7305918 + 1111 * i)
        assert (code in text) == (code in expected)


@pytest.fixture
def saying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Lets the model say a text, whatever it would have said: a model of this size calls no
    tools."""

    def script(tokens: list[int]) -> None:
        def sampler(_: Any, tokenizer: Any) -> Any:
            rest = iter([*tokens, *[tokenizer.eos_token_id] * 9])
            return lambda logprobs: mx.array([next(rest)])

        monkeypatch.setattr(mlx_server, "_make_sampler", sampler)

    yield script


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call(folder: str, demo_model: Any, saying: Any, stream: bool) -> None:
    said = f"<tool_call>{json.dumps(CALL)}</tool_call>"
    saying(demo_model[1].encode(said, add_special_tokens=False))
    with serving(folder, "--chat-template", TOOLS_TEMPLATE) as server, client_of(server) as client:
        answer = client.chat.completions.create(
            model="demo",
            messages=body(2),
            tools=[TOOL],
            max_tokens=60,
            stream=stream,
            extra_body={"kv": {"protect": "system", "budget": "60%"}},
        )
        if stream:
            events = [choice for event in answer for choice in event.choices]
            calls = [call for choice in events for call in choice.delta.tool_calls or []]
            reason = events[-1].finish_reason
        else:
            calls, reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
            assert answer.usage.kv["evicted"]
            tools = len(json.dumps(TOOL)) / 6
            assert answer.usage.kv["retained_tokens"] > tools
    assert reason == "tool_calls"
    assert [call.function.name for call in calls] == [CALL["name"]]
    assert json.loads(calls[0].function.arguments) == CALL["arguments"]
