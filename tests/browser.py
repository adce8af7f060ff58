"""A headless Chromium for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

# Nothing of the browser's own may reach out while a test runs.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium_path() -> str | None:
    """The browser: $KVKEEP_CHROMIUM, or the first of the usual names that is installed."""
    return os.environ.get("KVKEEP_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A browser, started once; tests open contexts of their own in it."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright comes with the extra dev"
    )
    path = chromium_path()
    if path is None:
        pytest.skip("there is no Chromium or Chrome on this machine")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        yield chromium
        chromium.close()
