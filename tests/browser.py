"""Pages in a headless browser. Whatever a page complains of, or asks the network for, fails.

The browser is the system's Chromium or Chrome; KVKEEP_BROWSER names another one. Where there is
none the tests are skipped, unless CI or KVKEEP_REQUIRE_BROWSER is set.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MAC = (
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
FLAGS = (
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DESKTOP, PHONE = (1280, 800), (390, 844)


def find_browser() -> str | None:
    """The browser to use, or None."""
    if named := os.environ.get("KVKEEP_BROWSER"):
        return named
    found = (shutil.which(name) for name in NAMES)
    there = (path for path in (*found, *MAC) if path and os.access(path, os.X_OK))
    return next(there, None)


def missing(what: str) -> None:
    """Skip the test, or fail it where a browser is required."""
    reason = f"{what}: pages are not looked at"
    if os.environ.get("CI") or os.environ.get("KVKEEP_REQUIRE_BROWSER"):
        pytest.fail(f"{reason}, and here they must be", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for the whole run."""
    path = find_browser()
    if path is None:
        missing("no Chromium or Chrome found (KVKEEP_BROWSER names one)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("the package playwright is not installed")
        raise
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        yield started
        started.close()


class OpenPage:
    """Opens pages, each in a window of its own, and writes down what they complain of."""

    def __init__(self, browser: Browser, folder: Path) -> None:
        self.browser, self.folder = browser, folder
        self.faults: list[str] = []
        self.contexts: list[Any] = []

    def __call__(
        self,
        html: str | Path,
        *,
        size: tuple[int, int] = DESKTOP,
        scheme: Any = "light",
        touch: bool = False,
    ) -> Page:
        """A page from HTML text or from a file.

        Args:
            size: (width, height) of the window.
            scheme: "light" or "dark", what the system prefers.
            touch: there is a finger.
        """
        if isinstance(html, str):
            file = self.folder / f"page-{len(self.contexts)}.html"
            file.write_text(html, encoding="utf-8")
        else:
            file = html
        context = self.browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, has_touch=touch
        )
        self.contexts.append(context)
        page = context.new_page()
        self._listen(page, file.resolve().as_uri())
        page.goto(file.resolve().as_uri())
        return page

    def taken_faults(self) -> list[str]:
        """The complaints so far, which then no longer fail the test."""
        taken, self.faults[:] = list(self.faults), []
        return taken

    def _listen(self, page: Page, address: str) -> None:
        def said(message: Any) -> None:
            if message.type in ("error", "warning"):
                self.faults.append(f"{message.type}: {message.text}")

        def asked(request: Any) -> None:
            if request.url.partition("#")[0] != address:
                self.faults.append(f"asked for {request.url}")

        page.on("pageerror", lambda error: self.faults.append(f"thrown: {error}"))
        page.on("console", said)
        page.on("request", asked)
        page.on("dialog", self._dismissed)

    def _dismissed(self, dialog: Any) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[OpenPage]:
    """Opens pages that must throw nothing, warn of nothing, and ask for nothing but their file."""
    opens = OpenPage(browser, tmp_path)
    yield opens
    for context in opens.contexts:
        context.close()
    assert not opens.faults, opens.faults


def overflow(page: Page) -> int:
    """By how many pixels a page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
