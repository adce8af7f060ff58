"""Memory of the server: what may begin, what has to wait, and what failures end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import PromptProcessingBatch

from kvkeep.footprint import measure_footprint
from kvkeep.server import batching, single
from kvkeep.server.current import Plan
from kvkeep.server.governor import Estimate
from kvkeep.server.settings import KvRequest
from kvkeep.spec import EvictionConfig
from serving import Running, chat, eventually, running, text_of, usage_of
from tiny_folder import write_tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")

LOG = " ".join(f"Line {i}: {i * i} boats came in." for i in range(12))
CONFIG = EvictionConfig.parse({"policy": "snapkv", "budget": "30%", "window": 8, "min_tokens": 64})
EXACT = {"eviction": "none"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("bounded") / "model"
    return str(write_tiny_folder(place, endless=True))


@pytest.fixture(scope="module")
def estimate(folder: str) -> Estimate:
    return Estimate(measure_footprint(mlx_lm.load(folder)[0]), 2048)


@pytest.fixture
def server(folder: str) -> Iterator[Running]:
    with running(folder, config=CONFIG, evicting=True) as server:
        yield server


def worth(estimate: Estimate, body: dict[str, Any], config: EvictionConfig | None) -> int:
    """Bytes that a request of that body takes at most; every character is a token."""
    length = sum(len(m["content"]) + 2 for m in body["messages"]) + 1
    plan = Plan(KvRequest(config), [1] * length, body["max_tokens"])
    return estimate.need(plan).most


def send_all(server: Running, bodies: list[Any]) -> list[tuple[int, Any]]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(server.send, bodies))


def active_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of all arrays after each step of a batch, as MLX counts them."""
    seen: list[int] = []
    step = batching.EvictingBatchGenerator._next

    def measured(self: Any) -> Any:
        found = step(self)
        mx.synchronize()
        seen.append(mx.get_active_memory())
        return found

    monkeypatch.setattr(batching.EvictingBatchGenerator, "_next", measured)
    return seen


# -- bounds ----------------------------------------------------------------------------


@pytest.mark.parametrize("evicted", [True, False])
@pytest.mark.parametrize("keep_compact", [True, False])
def test_twelve_at_once_stay_within_the_memory_of_three(
    folder: str,
    estimate: Estimate,
    evicted: bool,
    keep_compact: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kv = None if evicted else EXACT
    active = active_memory(monkeypatch)
    bodies = [chat(f"You are {i}.", LOG * 3, kv=kv, max_tokens=20 + 3 * i) for i in range(12)]
    limit = 3 * worth(estimate, bodies[-1], CONFIG if evicted else None) + 1000
    settings: dict[str, Any] = {"config": CONFIG, "evicting": True}
    with running(folder, **settings) as fresh:
        alone = [text_of(fresh.ask(body)) for body in bodies]
    with running(
        folder, kv_memory=limit, kv_queue_seconds=60, keep_compact=keep_compact, **settings
    ) as server:
        mx.synchronize()
        before = mx.get_active_memory()
        active.clear()
        answers = send_all(server, bodies)
        assert max(active) - before <= 1.05 * limit  # of all live arrays, whoever counts them
        assert [status for status, _ in answers] == [200] * 12  # all had the time to wait
        assert [text_of(answer) for _, answer in answers] == alone
        governor = server.responses.governor
        assert 0 < governor.peak <= 1.05 * limit
        eventually(lambda: governor.reserved == 0 and governor.in_flight == 0)
        assert server.responses.prompt_cache.nbytes <= limit
        assert usage_of(server.ask(bodies[0]))["kv"]["evicted"] == evicted


def test_who_waits_too_long_gets_503_and_the_server_goes_on(
    folder: str, estimate: Estimate
) -> None:
    body = chat("Be brief.", LOG, max_tokens=400)
    limit = worth(estimate, body, CONFIG) + 1000
    with running(
        folder, config=CONFIG, evicting=True, kv_memory=limit, kv_queue_seconds=0.2
    ) as server:
        answers = send_all(server, [body] * 5)
        statuses = sorted(status for status, _ in answers)
        assert statuses[0] == 200 and set(statuses) == {200, 503}
        for status, answer in answers:
            if status == 503:
                assert answer["error"]["code"] == "kv_memory_exhausted"
                assert answer["error"]["type"] == "server_error"
                assert str(limit) in answer["error"]["message"]
        assert server.responses.governor.peak <= 1.05 * limit
        server.ask(body)


def test_a_refusal_says_when_to_come_back(folder: str, estimate: Estimate) -> None:
    body = chat("Be brief.", LOG, max_tokens=4000)
    limit = worth(estimate, body, CONFIG) + 1000
    with (
        running(
            folder, config=CONFIG, evicting=True, kv_memory=limit, kv_queue_seconds=0
        ) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(server.send, body)
        eventually(lambda: server.responses.governor.reserved > 0)
        status, headers = server.headers_of(body)
        assert status == 503 and int(headers["Retry-After"]) >= 1
        assert first.result()[0] == 200


def test_what_can_never_fit_gets_413_with_the_figures(folder: str, estimate: Estimate) -> None:
    small, large = chat(LOG[:40], max_tokens=5), chat(LOG * 4, max_tokens=5)
    limit = worth(estimate, small, CONFIG) + 1000
    with running(folder, config=CONFIG, evicting=True, kv_memory=limit) as server:
        for body in (large, chat(LOG[:40], max_tokens=10000), {**large, "kv": EXACT}):
            status, error = server.refused(body)
            assert status == 413 and error["code"] == "kv_memory_too_small"
            assert str(limit) in error["message"] and "max_tokens" in error["message"]
        server.ask(small)
        status, error = server.refused({**large, "seed": 1})  # served alone, and bounded, too
        assert status == 413
        server.ask({**small, "seed": 1})


def test_stored_prompts_give_way_first(folder: str, estimate: Estimate) -> None:
    bodies = [chat(f"You are {i}.", LOG, max_tokens=20, kv=EXACT) for i in range(6)]
    limit = 2 * worth(estimate, bodies[0], None) + 1000
    with running(folder, kv_memory=limit, kv_queue_seconds=5) as server:
        for body in bodies:
            server.ask(body)
            assert server.responses.prompt_cache.nbytes <= limit
        assert len(server.responses.prompt_cache) > 0
        assert server.responses.governor.peak <= 1.05 * limit
        answers = send_all(server, bodies[:2])
        assert [status for status, _ in answers] == [200, 200]
        assert server.responses.governor.peak <= 1.05 * limit


def test_a_budget_is_shrunk_before_a_request_is_refused(folder: str, estimate: Estimate) -> None:
    """Its answer is long: with the budget that is asked it does not fit."""
    kv = {"budget": "90%", "min_tokens": 64}
    body = chat("Be brief.", LOG * 3, max_tokens=8, kv=kv)
    asked = EvictionConfig.parse(kv, CONFIG)
    need = worth(estimate, body, asked)
    settings: dict[str, Any] = {"config": CONFIG, "evicting": True, "kv_memory": need - 60000}
    with running(folder, **settings) as strict:
        assert strict.refused(body)[0] == 413
    with running(folder, kv_memory_shrink=True, **settings) as server:
        report = usage_of(server.ask(body))["kv"]
        assert report["asked_budget"] == "90%"
        assert report["retained_tokens"] == int(report["budget"]) + 1 < 0.9 * len(LOG * 3)
        assert server.responses.governor.peak <= 1.05 * (need - 60000)
        long = chat("Be brief.", LOG * 7, max_tokens=8, kv=EXACT)
        assert server.refused(long)[0] == 413  # nobody asked to evict it
        assert "asked_budget" not in usage_of(server.ask(chat(LOG)))["kv"]


# -- clients that leave ----------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("alone", [{}, {"seed": 1}], ids=["batch", "single"])
def test_a_client_that_leaves_frees_its_memory(
    server: Running, stream: bool, alone: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generated = count_steps(monkeypatch, alone)
    body = chat("Be brief.", LOG, max_tokens=100000, stream=stream, **alone)
    with contextlib.closing(server.open(body)):
        eventually(lambda: generated and generated[0] > 3)
    eventually(lambda: len(server.responses.monitor.snapshot().live) == 0)
    eventually(lambda: server.responses.governor.in_flight == 0)
    now = generated[0]
    time.sleep(0.3)
    assert generated[0] == now < 50000
    server.ask(chat(LOG, max_tokens=3, **alone))
    (gone,) = [v for v in server.responses.monitor.snapshot().recent if v.status == 499]
    assert gone.reason == "disconnect"


def count_steps(monkeypatch: pytest.MonkeyPatch, alone: dict[str, int]) -> list[int]:
    steps = [0]
    if alone:
        answer = single._evicting

        def counted(*args: Any) -> Any:
            for response in answer(*args):
                steps[0] += 1
                yield response

        monkeypatch.setattr(single, "_evicting", counted)
    else:
        step = batching.WatchedBatch.next

        def counted_step(self: Any) -> Any:
            found = step(self)
            steps[0] += bool(found)
            return found

        monkeypatch.setattr(batching.WatchedBatch, "next", counted_step)
    return steps


def test_a_client_that_leaves_while_it_waits_is_never_begun(
    folder: str, estimate: Estimate
) -> None:
    body = chat("Be brief.", LOG, max_tokens=4000)
    limit = worth(estimate, body, CONFIG) + 1000
    with (
        running(
            folder, config=CONFIG, evicting=True, kv_memory=limit, kv_queue_seconds=60
        ) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(server.send, body)
        eventually(lambda: server.responses.governor.reserved > 0)
        with contextlib.closing(server.open(body)):
            eventually(lambda: len(server.responses.admission) == 1)
        eventually(lambda: len(server.responses.admission) == 0)
        assert first.result()[0] == 200
        eventually(lambda: not server.responses.monitor.snapshot().live)
        (gone,) = [v for v in server.responses.monitor.snapshot().recent if v.status == 499]
        assert gone.generated == 0


# -- failures --------------------------------------------------------------------------


class Scarce:
    """Fails once where a batch holds a prompt that begins with some words."""

    def __init__(self, error: Exception) -> None:
        self.error: Exception | None = error

    def strike(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error


NO_MEMORY = RuntimeError("[malloc] Unable to allocate 123 bytes.")


@pytest.mark.parametrize("kv", [{}, EXACT], ids=["evicted", "exact"])
@pytest.mark.parametrize("stage", ["prompt", "decode", "compact", "join"])
def test_an_allocation_failure_ends_the_largest_request_only(
    folder: str, server: Running, monkeypatch: pytest.MonkeyPatch, kv: Any, stage: str
) -> None:
    bodies = [chat(f"You are {i}.", LOG[: 300 - 20 * i], kv=kv, max_tokens=30) for i in range(4)]
    with running(folder, config=CONFIG, evicting=True) as fresh:
        alone = [text_of(fresh.ask(body)) for body in bodies]
    scarce = Scarce(NO_MEMORY)

    def struck(cls: Any, name: str, when: Any) -> None:
        real = getattr(cls, name)

        def first(self: Any, *args: Any) -> Any:
            if when(self, *args):
                scarce.strike()
            return real(self, *args)

        monkeypatch.setattr(cls, name, first)

    def together(self: Any, *_: Any) -> bool:
        return len(self.uids) >= 3

    if stage == "prompt":
        struck(PromptProcessingBatch, "prompt", together)
    elif stage == "decode":
        struck(batching.WatchedBatch, "_step", lambda s: together(s) and s._num_tokens[0] > 4)
    elif stage == "compact":
        struck(batching.EvictingPromptBatch, "_compact", lambda self, *_: len(self.uids) > 0)
    else:
        monkeypatch.setattr(batching.WatchedBatch, "extend", joining(scarce))
    answers = together_of(server, bodies)
    failed = [i for i, (status, _) in enumerate(answers) if status == 503]
    assert len(failed) == 1, [status for status, _ in answers]
    assert answers[failed[0]][1]["error"]["code"] == "out_of_memory"
    for i, (status, answer) in enumerate(answers):
        if i not in failed:
            assert status == 200 and text_of(answer) == alone[i]
    assert scarce.error is None
    assert text_of(server.ask(bodies[0])) == alone[0]
    eventually(lambda: server.responses.governor.in_flight == 0)


def joining(scarce: Scarce) -> Any:
    """`extend` that fails in its midst."""
    plain = batching.GenerationBatch.extend

    def extend(self: Any, batch: Any) -> None:
        self.joining = True
        scarce.strike()
        plain(self, batch)
        self.joining = False

    return extend


def together_of(server: Running, bodies: list[Any]) -> list[tuple[int, Any]]:
    with server.gathered(len(bodies)):
        return send_all(server, bodies)


@pytest.mark.parametrize("kv", [{}, EXACT], ids=["evicted", "exact"])
def test_who_begins_again_in_mid_answer_gives_as_many_tokens(
    folder: str, server: Running, monkeypatch: pytest.MonkeyPatch, kv: Any
) -> None:
    """The step that fails has answered those that were there already."""
    first, second = chat("Be brief.", LOG[:200], kv=kv, max_tokens=400), chat("I join.", LOG, kv=kv)
    with running(folder, config=CONFIG, evicting=True) as fresh:
        alone = fresh.ask(first)
    steps = count_steps(monkeypatch, {})
    slow, scarce, plain = batching.WatchedBatch.next, Scarce(NO_MEMORY), batching.WatchedBatch

    def slowly(self: Any) -> Any:
        time.sleep(0.005)
        return slow(self)

    extend = plain.extend

    def joining_others(self: Any, batch: Any) -> None:
        if len(self.uids) > 0:
            self.joining = True
            scarce.strike()
        extend(self, batch)

    monkeypatch.setattr(plain, "next", slowly)
    monkeypatch.setattr(plain, "extend", joining_others)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.ask, first)
        eventually(lambda: steps[0] > 5)
        assert server.send({**second, "max_tokens": 2})[0] == 503  # the longer of the two
    assert scarce.error is None
    assert text_of(answer.result()) == text_of(alone)
    assert usage_of(answer.result())["completion_tokens"] == 400


def test_another_failure_ends_the_requests_of_its_step_only(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = Scarce(ValueError("unforeseen"))
    real = PromptProcessingBatch.prompt

    def first(self: Any, tokens: Any) -> Any:
        if tokens:
            scarce.strike()
        return real(self, tokens)

    monkeypatch.setattr(PromptProcessingBatch, "prompt", first)
    status, error = server.refused(chat("Be brief.", LOG))
    assert status == 500 and "unforeseen" in error["message"]
    server.ask(chat("Be brief.", LOG))


def test_an_allocation_failure_alone_is_503(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise NO_MEMORY
        yield

    with monkeypatch.context() as patch:
        patch.setattr(single, "_evicting", fails)
        assert server.refused(chat("Be brief.", LOG, seed=1))[0] == 503
    server.ask(chat("Be brief.", LOG, seed=1))


# -- parts -----------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [40, "30%", "200000B"])
@pytest.mark.parametrize("policy", ["snapkv", "snapkv-d"])
def test_no_cache_outgrows_its_estimate(
    folder: str, estimate: Estimate, budget: Any, policy: str
) -> None:
    config = EvictionConfig.parse({"policy": policy, "budget": budget, "min_tokens": 64})
    with running(folder, config=config, evicting=True) as server:
        for kv in (None, EXACT):
            governor = server.responses.governor
            governor.peak = 0
            body = chat("Be brief.", LOG, max_tokens=300, kv=kv)
            server.ask({**body, "stop": ["never said"]})
            used = governor.peak - server.responses.prompt_cache.nbytes
            assert 0 < used <= worth(estimate, body, None if kv else config)
