"""Prefix reuse of the server: exact and compact entries, turn by turn, user by user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache

from kvkeep.compaction import cache_nbytes, compact_prefilled, kept_as_it_is
from kvkeep.spec import EvictionConfig
from serving import TEXT, Running, chat, running, text_of, usage_of
from tiny_folder import write_tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")

CONFIG = EvictionConfig.parse({"policy": "snapkv", "budget": "30%", "window": 8, "min_tokens": 64})
LOG = " ".join(f"Line {i}: {i * i} boats came in." for i in range(12))
QUESTIONS = ("How many boats?", "And in line seven, how many of them?", "?", "Which was the last?")
ALONE = pytest.mark.parametrize("alone", [{}, {"seed": 1}], ids=["batch", "single"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("reused") / "model"
    return str(write_tiny_folder(place, endless=True))


@pytest.fixture(scope="module")
def loaded(folder: str) -> tuple[Any, Any]:
    return mlx_lm.load(folder)[:2]


@pytest.fixture
def compact(folder: str) -> Iterator[Running]:
    """A server that evicts, and keeps what it evicted."""
    with running(folder, config=CONFIG, evicting=True, keep_compact=True) as server:
        yield server


@pytest.fixture
def exact(folder: str) -> Iterator[Running]:
    """A server that evicts, and keeps exact caches only."""
    with running(folder, config=CONFIG, evicting=True) as server:
        yield server


def reuse_of(answer: Any) -> dict[str, Any]:
    usage = usage_of(answer)
    reuse = usage["kv"]["reuse"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == reuse["tokens"]
    return reuse


def conversation(server: Running, first: str = LOG, **fields: Any) -> list[Any]:
    """Four turns, each with the whole history, as a client sends it."""
    messages = [{"role": "system", "content": "Be brief."}]
    answers = []
    for question in QUESTIONS:
        said = f"{first} {question}" if not answers else question
        messages.append({"role": "user", "content": said})
        answer = server.ask({"messages": messages, "max_tokens": 20, **fields})
        messages.append({"role": "assistant", "content": text_of(answer)})
        answers.append(answer)
    return answers


def tokens_of(tokenizer: Any, server_messages: list[dict[str, str]]) -> list[int]:
    return list(tokenizer.apply_chat_template(server_messages, add_generation_prompt=True))


class ByHand:
    """Four turns over one cache with the library alone, by the server's own rules."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.cache: list[Any] = make_prompt_cache(model)
        self.read: list[int] = []
        self.compacted_at = 0

    def turn(self, prompt: list[int], window: int = 8) -> tuple[str, int, int]:
        """Answer, tokens reused, and bytes after the compaction."""
        shared = next(
            (i for i, (a, b) in enumerate(zip(self.read, prompt, strict=False)) if a != b),
            min(len(self.read), len(prompt) - 1),
        )
        assert shared >= self.compacted_at
        for layer in self.cache if self.read else ():
            layer.trim(len(self.read) - shared)
        held = prompt[:-1]
        if rest := held[shared:]:
            self.model(mx.array(rest)[None], cache=self.cache)
        if self.compacted_at and len(held) - self.compacted_at < window:
            result = kept_as_it_is(self.cache, len(held))
        else:
            result = compact_prefilled(self.model, held, self.cache, CONFIG)
            self.compacted_at = len(held)
        self.cache, size = result.cache, cache_nbytes(result.cache)
        text, self.read = "", list(prompt)
        for response in mlx_lm.stream_generate(
            self.model, self.tokenizer, prompt[-1:], prompt_cache=self.cache, max_tokens=20
        ):
            text += response.text
            self.read.append(response.token)
        self.read = self.read[: self.cache[0].offset]
        return text, shared, size


def test_four_turns_over_compact_entries_are_those_of_one_cache(
    compact: Running, loaded: tuple[Any, Any]
) -> None:
    by_hand = ByHand(*loaded)
    answers = conversation(compact)
    messages = [{"role": "system", "content": "Be brief."}]
    for turn, (question, answer) in enumerate(zip(QUESTIONS, answers, strict=True)):
        said = f"{LOG} {question}" if not turn else question
        messages.append({"role": "user", "content": said})
        text, shared, size = by_hand.turn(tokens_of(loaded[1], messages))
        assert text_of(answer) == text
        assert reuse_of(answer) == {"kind": "compact" if turn else "none", "tokens": shared}
        assert usage_of(answer)["kv"]["compact_bytes"] == size
        messages.append({"role": "assistant", "content": text})
    kept = [usage_of(answer)["kv"]["retained_tokens"] for answer in answers]
    assert all(usage_of(answer)["kv"]["evicted"] for answer in answers)
    assert max(kept) < 0.4 * usage_of(answers[-1])["prompt_tokens"]
    stored = list(compact.responses.prompt_cache)
    assert sum(entry.kind == "compact" for entry in stored) == len(QUESTIONS)
    # Of the exact rows only the system prompt's are kept: the compact ones stand for the rest.
    assert [entry.role for entry in stored if entry.kind == "exact"] == ["system"]


@ALONE
def test_four_turns_over_exact_entries_are_those_of_fresh_servers(
    folder: str, exact: Running, alone: dict[str, int]
) -> None:
    answers = conversation(exact, LOG, **alone)
    messages = [{"role": "system", "content": "Be brief."}]
    for turn, (question, answer) in enumerate(zip(QUESTIONS, answers, strict=True)):
        said = f"{LOG} {question}" if not turn else question
        messages.append({"role": "user", "content": said})
        with running(folder, config=CONFIG, evicting=True) as fresh:
            alike = fresh.ask({"messages": messages, "max_tokens": 20, **alone})
        assert text_of(answer) == text_of(alike)
        reuse = reuse_of(answer)
        assert (reuse["kind"] == "exact") == (turn > 0)
        assert turn == 0 or reuse["tokens"] > len(LOG)
        messages.append({"role": "assistant", "content": text_of(answer)})
    assert {entry.kind for entry in exact.responses.prompt_cache} == {"exact"}


@ALONE
def test_the_same_prompt_again_needs_no_choosing(compact: Running, alone: dict[str, int]) -> None:
    first, again = (compact.ask(chat("Be brief.", LOG, **alone)) for _ in range(2))
    assert text_of(first) == text_of(again)
    kv = usage_of(again)["kv"]
    assert reuse_of(again) == {"kind": "compact", "tokens": kv["prompt_tokens"] - 1}
    assert kv["compact_ms"] == 0 and kv["evicted"]
    assert kv["retained_tokens"] == usage_of(first)["kv"]["retained_tokens"]


@ALONE
def test_another_configuration_and_an_exact_request_take_no_compact_rows(
    folder: str, compact: Running, alone: dict[str, int]
) -> None:
    compact.ask(chat("Be brief.", LOG, **alone))
    for kv in ({"budget": "50%"}, {"eviction": "none"}, {"protect": [[5, 9]]}):
        body = chat("Be brief.", LOG, kv=kv, **alone)
        answer = compact.ask(body)
        assert reuse_of(answer)["kind"] in ("exact", "none")
        with running(folder, config=CONFIG, evicting=True) as fresh:
            assert text_of(answer) == text_of(fresh.ask(body))


def test_a_prompt_that_parts_early_takes_no_compact_rows(folder: str, compact: Running) -> None:
    compact.ask(chat("Be brief.", LOG))
    body = chat("Be brief.", LOG[:150] + " Stop here.")
    answer = compact.ask(body)
    assert reuse_of(answer)["kind"] == "exact"  # the system prompt's checkpoint
    with running(folder, config=CONFIG, evicting=True) as fresh:
        assert text_of(answer) == text_of(fresh.ask(body))


@pytest.mark.parametrize("keep_compact", [False, True])
def test_two_users_share_a_system_prompt(folder: str, keep_compact: bool) -> None:
    system = "You know this log. " + LOG
    bodies = [chat(system, f"I am user {i}. What is in line {i + 2}?") for i in range(3)]
    with running(folder, config=CONFIG, evicting=True) as fresh:
        alone = [fresh.ask(body) for body in bodies[:1]]
    for body in bodies[1:]:
        with running(folder, config=CONFIG, evicting=True) as fresh:
            alone.append(fresh.ask(body))
    with running(folder, config=CONFIG, evicting=True, keep_compact=keep_compact) as server:
        first = server.ask(bodies[0])
        together = [first, *server.ask_together(bodies[1:])]
    for one, other in zip(alone, together, strict=True):
        assert text_of(one) == text_of(other)
    for answer in together[1:]:
        assert reuse_of(answer)["kind"] == "exact" and reuse_of(answer)["tokens"] > len(system)


def test_two_models_never_mix(folder: str, tmp_path: Any) -> None:
    other = str(write_tiny_folder(tmp_path / "other", endless=True, seed=7))
    bodies = [chat("Be brief.", LOG, model=model) for model in (folder, other)]
    settings: dict[str, Any] = {"config": CONFIG, "evicting": True, "allow_model_paths": True}
    with running(folder, keep_compact=True, **settings) as server:
        answers = [server.ask(bodies[i]) for i in (0, 1, 0, 1)]
    assert text_of(answers[0]) == text_of(answers[2]) != text_of(answers[1])
    assert text_of(answers[1]) == text_of(answers[3])
    kinds = [reuse_of(answer)["kind"] for answer in answers]
    assert kinds == ["none", "none", "compact", "compact"]


@pytest.mark.parametrize("store", ["shared", "per-head", "ragged", "union"])
def test_every_store_is_reused(compact: Running, store: str) -> None:
    allocation = "adaptive" if store in ("ragged", "union") else "uniform"
    policy = "snapkv-d" if store == "shared" else "snapkv"
    kv = {"eviction": policy, "store": store, "allocation": allocation, "budget": "30%"}
    answers = conversation(compact, LOG[: 260 + len(store)], kv=kv)
    assert [reuse_of(answer)["kind"] for answer in answers] == ["none", *["compact"] * 3]
    assert all(usage_of(answer)["kv"]["evicted"] for answer in answers)


def test_policies_that_see_the_whole_prefill(compact: Running) -> None:
    """They are observed as it runs: only the same prompt, or a turn that is added, is reused."""
    kv = {"eviction": "expected_attention", "budget": "30%"}
    answers = conversation(compact, kv=kv)
    assert reuse_of(answers[0])["kind"] == "none"
    assert {reuse_of(answer)["kind"] for answer in answers[1:]} <= {"compact", "none"}
    again = {"eviction": "kvzip", "budget": "30%"}
    first, second = (compact.ask(chat("Be brief.", LOG, kv=again)) for _ in range(2))
    assert reuse_of(second)["kind"] == "compact" and text_of(first) == text_of(second)
    longer = compact.ask(chat("Be brief.", LOG + " And more of it.", kv=again))
    assert reuse_of(longer)["kind"] == "none"


def test_draft_models_and_compact_entries(folder: str, tmp_path: Any) -> None:
    draft = str(write_tiny_folder(tmp_path / "draft", endless=True, template=None, seed=5))
    argv = ["--draft-model", draft, "--num-draft-tokens", "2"]
    for keep_compact in (False, True):
        settings: dict[str, Any] = {"config": CONFIG, "evicting": True}
        with running(folder, *argv, keep_compact=keep_compact, **settings) as server:
            first, again = (server.ask(chat("Be brief.", LOG)) for _ in range(2))
            assert text_of(first) == text_of(again)
            kind = "compact" if keep_compact else "exact"
            assert reuse_of(again)["kind"] == kind and reuse_of(again)["tokens"] > 300


def test_bytes_of_the_prompt_cache_hold_on_both_paths(folder: str) -> None:
    settings: dict[str, Any] = {"config": CONFIG, "evicting": True, "keep_compact": True}
    with running(folder, "--prompt-cache-bytes", "300000", **settings) as server:
        for i in range(4):
            server.ask(chat(f"Be brief {i}.", LOG))
            server.ask(chat(f"Be brief {i}.", LOG, seed=1))
            server.ask({"prompt": LOG[i:], "max_tokens": 5, "kv": {"eviction": "none"}}, TEXT)
            assert server.responses.prompt_cache.nbytes <= 300000
        assert len(server.responses.prompt_cache) > 0
