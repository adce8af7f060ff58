"""The status page, in a browser, of a server that serves."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvkeep.server import batching
from kvkeep.server.monitor import Monitor, Stored
from kvkeep.server.seeing import status_of
from serving import Running, chat, running, usage_of
from test_serve_seeing import SMALL, WORDS, eventually, live, streaming
from tiny_folder import write_tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("page") / "model", endless=True))


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[Running]:
    with running(folder) as server:
        yield server


@contextmanager
def opened(
    browser: Any, server: Running, *, prepare: Callable[[Any], None] | None = None, **options: Any
) -> Iterator[Any]:
    """The page; nothing may go wrong in its console."""
    context = browser.new_context(**options)
    page, faults = context.new_page(), []
    page.set_default_timeout(15000)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda m: faults.append(m.text) if "Content Security" in m.text else None)
    if prepare is not None:
        prepare(page)
    page.goto(f"http://127.0.0.1:{server.port}/kv")
    try:
        yield page
    finally:
        context.close()
    assert faults == []


def connection(page: Any, state: str) -> str:
    return page.locator(f"#connection[data-state={state}]").inner_text()


def row(page: Any, table: str, name: str) -> list[str]:
    """Texts of a request's cells."""
    return page.locator(f"#{table} tbody tr", has_text=name).locator("th, td").all_inner_texts()


def answering(now: dict[str, Any]) -> Callable[[Any], None]:
    """Let the page read this instead of the server's own numbers."""
    return lambda page: page.route("**/v1/kv", lambda route: route.fulfill(json=now))


def test_the_page_shows_requests_live_and_ended(
    browser: Any, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = batching.EvictingBatchGenerator._next

    def slowly(self: Any) -> Any:
        time.sleep(0.02)
        return step(self)

    monkeypatch.setattr(batching.EvictingBatchGenerator, "_next", slowly)
    usage = usage_of(server.send(chat(WORDS, kv=SMALL), headers={"X-Request-Id": "first-1"})[1])
    with opened(browser, server) as page:
        assert connection(page, "live") == "Live"
        (done,) = [row(page, "recent", "first-1")]
        kept = round(100 * 49 / usage["kv"]["prompt_tokens"])
        assert done[:4] == ["first-1", "length", "snapkv 48", str(usage["prompt_tokens"])]
        assert done[5].strip() == f"{kept} %"
        assert page.locator("#live-none").is_visible()
        body = chat(WORDS, kv=SMALL, stream=True, max_tokens=5000)
        with streaming(server, body, **{"X-Request-Id": "second-2"}):
            page.locator("#live tbody tr", has_text="second-2").wait_for()
            assert row(page, "live", "second-2")[1] == "decode"
            bar = page.locator("#live [role=meter]")
            assert int(bar.get_attribute("aria-valuenow")) == kept
            widths = [bar.bounding_box()["width"], bar.locator("span").bounding_box()["width"]]
            assert widths[1] == pytest.approx(widths[0] * kept / 100, rel=0.1)
            told = page.locator("#memory").get_attribute("aria-label")
            size = re.search(r"In flight, exact: 0 B; In flight, compact: ([0-9.]+) KB;", told)
            # With room for the answer, which grows by steps.
            assert size and float(size[1]) >= 0.99 * usage["kv"]["compact_bytes"] / 1000
            answered = int(row(page, "live", "second-2")[7])
            eventually(lambda: int(row(page, "live", "second-2")[7]) > answered)
        page.locator("#recent tbody tr", has_text="second-2").wait_for()
        assert row(page, "recent", "second-2")[1] == "499 disconnect"
        assert page.locator("#live-none").is_visible()
    eventually(lambda: not live(server))


def test_the_page_asks_for_the_key_once(browser: Any, folder: str) -> None:
    with running(folder, api_key="secret") as server, opened(browser, server) as page:
        field = page.get_by_label("API key")
        assert connection(page, "locked") == "Key needed"
        assert page.locator("main").is_hidden()
        field.fill("wrong")
        page.get_by_role("button").click()
        page.get_by_role("alert").get_by_text("does not take this key").wait_for()
        field.fill("schlüssel")
        page.get_by_role("button").click()
        page.get_by_role("alert").get_by_text("printable ASCII").wait_for()
        field.fill("secret")
        field.press("Enter")
        assert connection(page, "live") == "Live"
        assert page.locator("main").is_visible() and field.is_hidden()
        assert "secret" not in page.content()
        page.reload()
        assert connection(page, "live") == "Live"
        assert page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]
        assert "secret" not in page.url and page.context.cookies() == []


def test_a_lost_connection_is_told_and_mended(browser: Any, server: Running) -> None:
    with opened(browser, server) as page:
        assert connection(page, "live") == "Live"
        page.route("**/v1/kv", lambda route: route.abort())
        assert connection(page, "lost").startswith("No connection; numbers of ")
        page.unroute("**/v1/kv")
        page.route("**/v1/kv", lambda route: route.fulfill(status=503, body="{}"))
        with page.expect_response("**/v1/kv"):
            pass
        assert connection(page, "lost").startswith("No connection")
        page.unroute("**/v1/kv")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        assert connection(page, "live") == "Live"


def test_polling_slows_down_for_a_server_that_is_gone_and_a_page_that_is_hidden(
    browser: Any, server: Running
) -> None:
    asked: list[int] = []
    ways = {"dead": False}

    def answer(route: Any) -> None:
        asked.append(1)
        if ways["dead"]:
            route.abort()
        else:
            route.fulfill(json=status_of(Monitor().snapshot()))

    def prepare(page: Any) -> None:
        page.clock.install()
        page.route("**/v1/kv", answer)

    with opened(browser, server, prepare=prepare) as page:

        def asks_in(seconds: int) -> int:
            asked.clear()
            for _ in range(4 * seconds):
                page.clock.run_for(250)
            return len(asked)

        assert connection(page, "live") == "Live"
        assert 8 <= asks_in(10) <= 11
        ways["dead"] = True
        assert 3 <= asks_in(15) <= 5  # after 1, 2, 4 and 8 s
        ways["dead"] = False
        eventually(lambda: asks_in(8) >= 3)
        page.evaluate("Object.defineProperty(document, 'hidden', {value: true, writable: true})")
        asks_in(2)
        assert asks_in(31) == 2
        page.evaluate("document.hidden = false")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        assert asks_in(5) >= 4


def test_what_the_server_says_is_text(browser: Any, server: Running) -> None:
    evil = "<img src=x onerror=\"document.title='taken'\">"
    monitor = Monitor()
    entry = monitor.begin(evil, kind=evil)
    entry.asks(evil, evil, stream=True)
    entry.queued()
    monitor.begin("b", kind=evil).finished(400, evil)
    with opened(browser, server, prepare=answering(status_of(monitor.snapshot()))) as page:
        assert connection(page, "live") == "Live"
        assert row(page, "live", "img")[:3] == [evil, "queued", f"{evil} {evil}"]
        assert page.locator("img").count() == 0
        assert page.title() == "kvkeep server"


def crowded() -> dict[str, Any]:
    """A server with much to show."""
    monitor = Monitor()
    monitor.prompt_cache = lambda: {"exact": Stored(9, 7 * 10**9), "compact": Stored(30, 10**9)}
    monitor.limits = {"kv_memory": 16 * 10**9}
    for i in range(30):
        entry = monitor.begin("x" * 64, kind="/v1/chat/completions")
        entry.asks("expected_attention", "1234567890B", stream=True)
        entry.queued()
        entry.admitted(131072, 100000, "compact")
        report = {"exact_bytes": 17 * 10**9 // 7, "compact_bytes": 10**8 + i, "compact_ms": 99.0}
        entry.compacted({**report, "retained_tokens": 32768, "evicted": True})
        entry.token()
        if i % 2:
            entry.finished(503 if i % 3 else 200, "too_many_requests_are_waiting")
    return json.loads(json.dumps(status_of(monitor.snapshot())))


def test_the_page_fits_every_width(browser: Any, server: Running) -> None:
    inside = """() => [...document.querySelectorAll("section")].every((section) =>
        [...section.querySelectorAll("tbody > tr > *, dd")].every((cell) =>
            cell.getBoundingClientRect().right <= section.getBoundingClientRect().right &&
            cell.scrollWidth <= cell.offsetWidth + (cell.scope === "row" ? 999 : 0)))"""
    with opened(browser, server, prepare=answering(crowded())) as page:
        assert connection(page, "live") == "Live"
        assert page.locator("#memory-limit").inner_text() == "of 16 GB"
        for width in (320, 390, 768, 1024, 1120, 1280, 1920):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, width
            assert page.evaluate(inside), width


def test_roles_and_names_for_those_who_listen(browser: Any, server: Running) -> None:
    phone = {"width": 390, "height": 800}
    with opened(browser, server, prepare=answering(crowded()), viewport=phone) as page:
        assert connection(page, "live") == "Live"
        assert page.get_by_role("status").inner_text() == "Live"
        for name in ("Live", "Last ended"):
            table = page.get_by_role("table", name=name)
            headers = table.get_by_role("columnheader")
            assert headers.count() == len(table.get_by_role("row").nth(1).locator("> *").all())
            assert table.get_by_role("rowheader").count() == len(table.locator("tbody tr").all())
        assert page.get_by_role("img", name="Prompt cache, compact: 1 GB").count() == 1
        meters = page.get_by_role("meter", name="share of the prompt's rows that is kept")
        assert meters.count() == 30
        assert page.locator("html").get_attribute("lang") == "en"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_schemes(browser: Any, server: Running, scheme: str) -> None:
    with opened(browser, server, prepare=answering(crowded()), color_scheme=scheme) as page:
        assert connection(page, "live") == "Live"
        ratios = page.evaluate(
            """() => {
                const part = (v) => ((v / 255 + 0.055) / 1.055) ** 2.4; // of sRGB, close enough
                const light = (color) => {
                    const [r, g, b] = color.match(/[0-9.]+/g).map(Number).map(part);
                    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
                };
                const ground = (e) => {
                    const color = getComputedStyle(e).backgroundColor;
                    return color !== "rgba(0, 0, 0, 0)" ? color : ground(e.parentElement);
                };
                const told = [...document.querySelectorAll("h1, h2, p, dt, dd, th, td")];
                return told.filter((e) => e.textContent).map((e) => {
                    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))];
                    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
                });
            }"""
        )
        assert len(ratios) > 100 and min(ratios) >= 4.5
