"""The server: its answers over exact and compact caches, one by one and in batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from mlx_lm.models.cache import KVCache

import kvkeep
from kvkeep.server import batching
from kvkeep.spec import Budget, EvictionConfig
from serving import CHAT, TEXT, Running, chat, running, running_stock, text_of, usage_of
from tiny_folder import CHAT_TEMPLATE, write_tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")

LOG = " ".join(f"Line {i}: {i * i} boats came in." for i in range(12))
OTHER = " ".join(f"{i} gulls sat on pier {i % 7}," for i in range(14))
SMALL = {"eviction": "snapkv", "budget": 48, "window": 8}
EIGHT: list[dict[str, Any]] = [
    SMALL,
    {"eviction": "none"},
    {"eviction": "lookahead", "budget": "30%", "draft_tokens": 5},
    {"eviction": "knorm", "budget": 64},
    {"eviction": "snapkv", "allocation": "adaptive", "budget": 60},
    {"eviction": "snapkv", "allocation": "adaptive", "store": "union", "budget": 60},
    {"eviction": "snapkv-d", "budget": 40, "protect": [[10, 20]]},
    {"budget": 100000},
]
TOOLS_TEMPLATE = "{% if tools %}<|system|>{{ tools[0].name }}<|end|>{% endif %}" + CHAT_TEMPLATE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose greedy answers never end by themselves."""
    place = tmp_path_factory.mktemp("served") / "model"
    return str(write_tiny_folder(place, endless=True, template=TOOLS_TEMPLATE))


@pytest.fixture(scope="module")
def loaded(folder: str) -> tuple[Any, Any]:
    return mlx_lm.load(folder)[:2]


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[Running]:
    with running(folder) as server:
        yield server


@pytest.fixture(scope="module")
def evicting(folder: str) -> Iterator[Running]:
    """A server that evicts by default."""
    config = EvictionConfig.parse({"policy": "snapkv", "budget": 48, "window": 8})
    with running(folder, config=config, evicting=True) as server:
        yield server


def without_ids(answer: Any) -> Any:
    if isinstance(answer, list):
        return [without_ids(event) for event in answer]
    if not isinstance(answer, dict):
        return answer
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


# -- as mlx-lm -------------------------------------------------------------------------


def test_without_eviction_answers_are_those_of_mlx_lm(server: Running) -> None:
    usage = {"stream_options": {"include_usage": True}}
    asked = [
        (CHAT, chat("Be kind.", LOG)),
        (CHAT, chat("Be kind.", LOG + " And then?", stream=True, **usage)),
        (CHAT, chat("Be kind.", OTHER, logprobs=True, top_logprobs=3)),
        (CHAT, chat("Be kind.", OTHER, seed=3, temperature=0.8)),
        (CHAT, chat(LOG, stop=["4", "boat"], repetition_penalty=1.2)),
        (TEXT, {"prompt": LOG, "max_tokens": 9}),
        (TEXT, {"prompt": LOG, "max_tokens": 9, "stream": True}),
    ]
    with running_stock(server) as stock:
        for path, body in asked:
            ours, theirs = server.ask(body, path), stock.ask(body, path)
            assert without_ids(ours) == without_ids(theirs)


def test_a_prompt_that_is_wholly_cached_is_answered(server: Running) -> None:
    """mlx-lm's own generation thread ends on it: no token is left to step from."""
    first = server.ask({"prompt": LOG[:60], "max_tokens": 4}, TEXT)
    said = LOG[:60] + first["choices"][0]["text"][:3]
    fresh = {"prompt": said, "max_tokens": 5, "kv": {"eviction": "none"}}
    again = [server.ask(fresh, TEXT)["choices"][0]["text"] for _ in range(2)]
    assert again[0] == again[1]
    assert server.get("/health")[0] == 200


# -- batches ---------------------------------------------------------------------------


@pytest.fixture
def batch_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests decoded together, step by step."""
    sizes: list[int] = []
    step = batching.EvictingBatchGenerator._next

    def counted(self: Any) -> Any:
        sizes.append(len(self._generation_batch))
        return step(self)

    monkeypatch.setattr(batching.EvictingBatchGenerator, "_next", counted)
    return sizes


@pytest.mark.parametrize("stream", [False, True])
def test_eight_mixed_requests_at_once_answer_as_alone(
    folder: str, server: Running, batch_sizes: list[int], stream: bool
) -> None:
    def body(which: int) -> dict[str, Any]:
        extra: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        words = (LOG, OTHER)[which % 2][: 400 - 17 * which]
        return chat(
            f"You are {which}.", words, kv=EIGHT[which], stream=stream, max_tokens=60, **extra
        )

    with running(folder) as fresh:
        alone = [fresh.ask(body(i)) for i in range(8)]
    batch_sizes.clear()
    together = server.ask_together([body(i) for i in range(8)])
    assert max(batch_sizes) >= 7
    for one, other, kv in zip(alone, together, EIGHT, strict=True):
        assert text_of(other) == text_of(one)
        reports = [usage_of(a)["kv"] for a in (one, other)]
        for report in reports:
            report.pop("compact_ms")
            report.pop("reuse")
        assert reports[0] == reports[1]
        assert reports[0]["evicted"] is (kv not in (EIGHT[1], EIGHT[7]))


def test_an_evicted_answer_is_that_of_generate(evicting: Running, loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    config = EvictionConfig.parse({"policy": "snapkv", "budget": 48, "window": 8})
    words = [{"role": "user", "content": OTHER}]
    tokens = tokenizer.apply_chat_template(words, add_generation_prompt=True)
    answer = evicting.ask(chat(OTHER))
    assert text_of(answer) == kvkeep.generate(
        model, tokenizer, tokens, config=config, max_tokens=24
    )
    exact = evicting.ask(chat(OTHER, kv={"eviction": "none"}))
    assert text_of(exact) == kvkeep.generate(model, tokenizer, tokens, config=None, max_tokens=24)
    assert text_of(exact) != text_of(answer)
    assert usage_of(answer)["kv"]["retained_tokens"] == 49


def test_reported_bytes_are_those_of_the_live_arrays(
    evicting: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    live: list[int] = []
    compact = batching.EvictingPromptBatch._compact

    def measured(self: Any, *args: Any) -> None:
        compact(self, *args)
        singles = [layer.extract(0) for layer in self.prompt_cache]
        live.append(sum(one.keys.nbytes + one.values.nbytes for one in singles))

    monkeypatch.setattr(batching.EvictingPromptBatch, "_compact", measured)
    for kv in (None, {"eviction": "none"}, {"budget": 77}):
        report = usage_of(evicting.ask(chat("Be brief.", OTHER, kv=kv)))["kv"]
        assert report["compact_bytes"] == live.pop()
        rows = report["prompt_tokens"] - 1
        assert report["exact_bytes"] * (report["retained_tokens"] - 1) == (
            report["compact_bytes"] * rows
        )


def test_a_short_prompt_stays_exact(evicting: Running) -> None:
    report = usage_of(evicting.ask(chat("Hello")))["kv"]
    assert (report["policy"], report["evicted"]) == ("snapkv", False)
    assert report["retained_tokens"] == report["prompt_tokens"]
    one_token = usage_of(evicting.ask({"prompt": "H", "max_tokens": 2}, TEXT))["kv"]
    assert (one_token["prompt_tokens"], one_token["compact_bytes"]) == (1, 0)


def test_one_request_that_fails_leaves_the_others_alone(evicting: Running) -> None:
    alone = text_of(evicting.ask(chat(LOG)))
    broken = chat(LOG + "!", kv={"budget": "10B"})
    streamed = chat(LOG + "?", kv={"budget": "10B"}, stream=True)
    bodies = [chat(LOG), broken, streamed]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(evicting.send, bodies))
    assert text_of(answers[0][1]) == alone
    assert answers[1][0] == 400 and "holds no row" in answers[1][1]["error"]["message"]
    assert "holds no row" in answers[2][1][-1]["error"]["message"]
    assert evicting.get("/health")[0] == 200


def test_an_unforeseen_failure_is_one_requests_own(
    evicting: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    compact = batching.compact_prefilled

    def failing(model: Any, tokens: Any, cache: Any, config: EvictionConfig, **more: Any) -> Any:
        if config.budget == Budget(33):
            raise RuntimeError("no memory for this one")
        return compact(model, tokens, cache, config, **more)

    monkeypatch.setattr(batching, "compact_prefilled", failing)
    alone = text_of(evicting.ask(chat(OTHER)))
    bodies = [chat(OTHER), chat(OTHER + ".", kv={"budget": 33}), chat(OTHER)]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(evicting.send, bodies))
    assert [text_of(answers[i][1]) for i in (0, 2)] == [alone, alone]
    status, answer = answers[1]
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert evicting.get("/health")[0] == 200


# -- the prompt cache ------------------------------------------------------------------


def entries(server: Running) -> list[list[Any]]:
    """The caches that the prompt cache holds."""
    return [entry.layers for entry in server.responses.prompt_cache]


@pytest.mark.parametrize("alone", [{}, {"seed": 1}], ids=["batch", "single"])
def test_a_shared_exact_prefix_is_reused_and_evicted_like_a_fresh_prompt(
    folder: str, evicting: Running, alone: dict[str, int]
) -> None:
    system = "Remember this: " + OTHER[: 200 + len(alone)]
    with running(folder, config=evicting.responses.settings.config, evicting=True) as fresh:
        expected = text_of(fresh.ask(chat(system, "How many gulls?", **alone)))
    # Leaves checkpoints of its exact prefixes behind, whatever became of its own cache.
    evicting.ask(chat(system, "Which pier?"))
    answer = evicting.ask(chat(system, "How many gulls?", **alone))
    usage = usage_of(answer)
    assert usage["prompt_tokens_details"]["cached_tokens"] > len(system) - 20
    assert usage["kv"]["evicted"] and usage["kv"]["prompt_tokens"] == usage["prompt_tokens"]
    assert text_of(answer) == expected
    assert all(type(layer) is KVCache for entry in entries(evicting) for layer in entry)


def test_the_same_prompt_again_is_evicted_again(evicting: Running) -> None:
    bodies = [chat(LOG[:300], **more) for more in ({}, {}, {"seed": 1}, {"seed": 1})]
    answers = [evicting.ask(body) for body in bodies]
    assert len({text_of(answer) for answer in answers}) == 1
    assert all(usage_of(answer)["kv"]["evicted"] for answer in answers)
    assert usage_of(answers[1])["prompt_tokens_details"]["cached_tokens"] > 290


# -- one at a time ---------------------------------------------------------------------


def test_a_policy_that_must_see_the_prefill_is_served_alone(
    server: Running, loaded: tuple[Any, Any], batch_sizes: list[int]
) -> None:
    model, tokenizer = loaded
    config = EvictionConfig.parse({"policy": "observed_attention", "budget": 50})
    words = [{"role": "user", "content": LOG}]
    tokens = tokenizer.apply_chat_template(words, add_generation_prompt=True)
    kv = {"policy": "observed_attention", "budget": 50}
    server.ask(chat(LOG))  # its exact prefix must not be taken: it was not observed
    for _ in range(2):
        answer = server.ask(chat(LOG, kv=kv))
        assert usage_of(answer)["prompt_tokens_details"]["cached_tokens"] == 0
        assert usage_of(answer)["kv"]["retained_tokens"] == 51
        assert text_of(answer) == kvkeep.generate(
            model, tokenizer, tokens, config=config, max_tokens=24
        )


@pytest.mark.parametrize("flags", ["draft", "bits"])
def test_draft_models_and_quantised_caches(
    folder: str, loaded: tuple[Any, Any], tmp_path: Path, flags: str
) -> None:
    model, tokenizer = loaded
    options: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    argv = ["--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0"]
    if flags == "draft":
        draft = str(write_tiny_folder(tmp_path / "draft", endless=True, template=None, seed=5))
        argv = ["--draft-model", draft, "--num-draft-tokens", "2"]
        options = {"draft_model": mlx_lm.load(draft)[0], "num_draft_tokens": 2}
    words = [{"role": "user", "content": LOG}]
    tokens = tokenizer.apply_chat_template(words, add_generation_prompt=True)
    config = EvictionConfig.parse({"policy": "snapkv", "budget": 48, "window": 8})
    expected = kvkeep.generate(model, tokenizer, tokens, config=config, max_tokens=24, **options)
    with running(folder, *argv) as server:
        exact = server.ask(chat(LOG))  # leaves its cache: quantised, or two models' in one
        answers = [server.ask(chat(LOG, kv=SMALL)) for _ in range(2)]
        assert [text_of(answer) for answer in answers] == [expected] * 2
        assert text_of(exact) != expected
        assert all(usage_of(answer)["kv"]["retained_tokens"] == 49 for answer in answers)
        if flags == "bits":
            uneven = {"eviction": "snapkv", "allocation": "adaptive", "budget": 48}
            status, error = server.refused(chat(LOG, kv=uneven))
            assert status == 400 and "cannot be quantised" in error["message"]


def test_a_model_with_sliding_layers_is_evicted_alone(
    tmp_path: Path, batch_sizes: list[int]
) -> None:
    """Their rows cannot be taken back, so the window's queries are observed in the prefill."""
    place = write_tiny_folder(tmp_path / "sliding", endless=True)
    config = json.loads((place / "config.json").read_text(encoding="utf-8"))
    kinds = ["sliding_attention", "full_attention"]
    config |= {"layer_types": kinds, "sliding_window": 32}
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model, tokenizer = mlx_lm.load(str(place))[:2]
    words = [{"role": "user", "content": LOG}]
    tokens = tokenizer.apply_chat_template(words, add_generation_prompt=True)
    asked = EvictionConfig.parse({"policy": "snapkv", "budget": 48, "window": 8})
    with running(str(place)) as server:
        assert batch_sizes == []
        answer = server.ask(chat(LOG, kv=SMALL))
        assert batch_sizes == []
        assert text_of(answer) == kvkeep.generate(
            model, tokenizer, tokens, config=asked, max_tokens=24
        )
        server.ask(chat(LOG, kv={"eviction": "none"}))
        assert batch_sizes


# -- protection ------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [None, [{"name": "find_boats", "type": "function"}]])
def test_the_system_prompt_is_protected(
    server: Running, monkeypatch: pytest.MonkeyPatch, tools: Any
) -> None:
    seen: list[EvictionConfig] = []
    compact = batching.compact_prefilled

    def watched(model: Any, tokens: Any, cache: Any, config: EvictionConfig, **more: Any) -> Any:
        seen.append(config)
        return compact(model, tokens, cache, config, **more)

    monkeypatch.setattr(batching, "compact_prefilled", watched)
    kv = {"budget": 120, "protect": "system"}
    extra = {} if tools is None else {"tools": tools}
    server.ask(chat("Be brief.", LOG, kv=kv, **extra))
    head = len("0Be brief.00") + (0 if tools is None else len("0find_boats0"))
    assert seen[0].protect == ((0, head),)
    # The last message is the assistant's: mlx-lm looks for no system segment then.
    body = chat("Be brief.", LOG, kv=kv, **extra)
    body["messages"].append({"role": "assistant", "content": "Well"})
    server.ask(body)
    assert seen[1].protect == ((0, head),)
    if tools is not None:
        server.ask(chat(LOG, kv=kv, **extra))
        assert seen[2].protect == ((0, head - len("0Be brief.0")),)


def test_nothing_to_protect_protects_nothing(server: Running) -> None:
    report = usage_of(server.ask(chat(LOG, kv={"budget": 20, "protect": "system"})))["kv"]
    assert report["retained_tokens"] == 21
    kv = {"budget": 20, "protect": "system"}
    with running(server.responses.cli_args.model, evicting=True, protect_system=True) as other:
        assert usage_of(other.ask({"prompt": LOG, "max_tokens": 2}, TEXT))["kv"]["evicted"]
    status, error = server.refused({"prompt": LOG, "kv": kv}, TEXT)
    assert (status, error["param"]) == (400, "kv.protect")
    status, error = server.refused(chat("Be brief. " * 9, LOG, kv=kv))
    assert status == 400 and "protected positions" in error["message"]
