"""Self-contained pages: what texts and data cannot do, and that nothing else runs."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from browser import DESKTOP, PHONE, OpenPage, find_browser, missing, overflow
from kvkeep.errors import OutputError
from kvkeep.pages import count, escaped, nbytes, percent, render_page, require_writable, written

NASTY = (
    "</script><script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    "<!--<script>",
    "]]>&lt;&amp;",
    '" onmouseover="window.pwned=1',
    "a\u2028b\u2029c",
    "nul\0 bell\x07 lone\ud800",
    "שלום עולם مرحبا",
    "👩‍💻 e\u0301 🇩🇪",
)


class Islands(HTMLParser):
    """The elements of a page, and the text of its script elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts[-1] += data


@given(st.text(st.characters(exclude_categories=())))
def test_data_comes_back_and_adds_no_element(text: str) -> None:
    page = render_page(text, f"<p>{escaped(text)}</p>", data={"data": {"text": text}})
    page.encode("utf-8")
    read = Islands(page)
    assert [json.loads(script) for script in read.scripts] == [{"text": text}]
    assert read.tags == Islands(render_page("", "<p></p>", data={"data": 0})).tags


@pytest.mark.parametrize("text", NASTY)
def test_texts_are_escaped(text: str) -> None:
    page = render_page(text, f'<p title="{escaped(text)}">{escaped(text)}</p>')
    body = page.partition("<body>")[2]
    shown = html.unescape(body)
    assert text.replace("\0", "\ufffd").replace("\ud800", "?") in shown
    assert "<script" not in page and "<img" not in page


def test_not_a_number_is_no_data() -> None:
    with pytest.raises(ValueError, match="JSON"):
        render_page("x", "", data={"data": float("nan")})


def test_only_the_pages_own_script_and_style_run(open_page: OpenPage) -> None:
    """An inline script, handler and style that got into the body would still do nothing."""
    text = render_page(
        "page",
        '<p id="p">text</p>',
        styles=("p { color: rgb(1, 2, 3); }",),
        scripts=("window.ours = JSON.parse(document.getElementById('d').textContent);",),
        data={"d": [1, "<b>"]},
    )
    assert "unsafe" not in text
    page = open_page(text)
    assert page.evaluate("window.ours") == [1, "<b>"]
    assert page.evaluate("getComputedStyle(p).color") == "rgb(1, 2, 3)"


def test_a_strangers_script_is_refused_by_the_policy(open_page: OpenPage) -> None:
    body = "<script>window.pwned = 1</script><p onclick='window.pwned = 2' id=p>x</p>"
    page = open_page(render_page("page", body))
    page.click("#p")
    assert page.evaluate("window.pwned") is None
    page.evaluate("fetch('http://127.0.0.1:9/').catch(() => { window.refused = true; })")
    page.wait_for_function("() => window.refused")
    faults = open_page.taken_faults()
    assert len(faults) == 4 and all("Content Security Policy" in fault for fault in faults)


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_theme_has_two_schemes_and_fits(size: tuple[int, int], open_page: OpenPage) -> None:
    words = f'<h1>Title</h1><div class="panel"><p>{"word " * 50}</p></div>'
    seen = []
    for scheme in ("light", "dark"):
        page = open_page(render_page("page", words), size=size, scheme=scheme)
        assert overflow(page) <= 0
        seen.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    light, dark = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in seen)
    assert light > 600 and dark < 150


def test_files_are_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    with written(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole"
    with pytest.raises(RuntimeError), written(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "whole"
    assert [entry.name for entry in path.parent.iterdir()] == ["page.html"]


def test_names_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").write_text("")
    for name, message in (
        (tmp_path / "page.txt", "ends in .html"),
        (tmp_path / "folder.html", "is a folder"),
        (tmp_path / "file" / "page.html", "cannot write"),
    ):
        with pytest.raises(OutputError, match=message):
            require_writable(name, ".html")
    require_writable(tmp_path / "deep" / "er" / "page.HTML", ".html")
    with pytest.raises(OutputError, match="cannot write"), written(tmp_path / "file" / "x.html"):
        pass


def test_figures() -> None:
    assert [nbytes(n) for n in (0, 999, 25_250_000, 10**9)] == [
        "0 B",
        "999 B",
        "25.25 MB",
        "1.00 GB",
    ]
    assert (count(1234567), percent(1, 3), percent(1, 0)) == ("1,234,567", "33.3%", "–")


def test_a_missing_browser_is_a_skip_here_and_a_fault_in_ci(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CI", "KVKEEP_REQUIRE_BROWSER"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no browser"):
        missing("no browser")
    monkeypatch.setenv("KVKEEP_REQUIRE_BROWSER", "1")
    with pytest.raises(pytest.fail.Exception, match="must be"):
        missing("no browser")
    monkeypatch.setenv("KVKEEP_BROWSER", "/some/browser")
    assert find_browser() == "/some/browser"
