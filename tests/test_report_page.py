"""Report pages in a browser: both schemes, any width, names for what is drawn, no network."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from bench_reports import a_decode, a_prompt, a_report
from browser import DESKTOP, OpenPage, overflow
from kvkeep.evaluation import Results
from kvkeep.reports import bench_page, eval_page
from report_results import NASTY, SCORES, a_header, some_results
from test_report_safety import ORIGIN, nasty_pages

if TYPE_CHECKING:
    from playwright.sync_api import Page

SMALL_PHONE = (360, 780)


def pages() -> dict[str, str]:
    return {
        "eval": eval_page(some_results(), ORIGIN),
        "bench": bench_page(a_report(a_prompt(), a_decode(batch=1), a_decode()), ORIGIN),
        "empty": eval_page(Results(a_header(), ()), ORIGIN),
        **{f"nasty {n}": page for n, page in enumerate(nasty_pages()[:2])},
    }


def unfold(page: Page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")


@pytest.mark.parametrize("size", [DESKTOP, SMALL_PHONE])
def test_no_page_scrolls_sideways(size: tuple[int, int], open_page: OpenPage) -> None:
    for name, text in pages().items():
        page = open_page(text, size=size)
        assert overflow(page) <= 0, name
        unfold(page)
        assert overflow(page) <= 0, name
        cut = page.evaluate(
            """() => [...document.querySelectorAll("body *")].filter((node) => {
                 if (node.closest(".scrolled, svg, .unseen")) return false;
                 return node.getBoundingClientRect().right > innerWidth + 0.5;
               }).map((node) => node.outerHTML.slice(0, 80))"""
        )
        assert cut == [], name
        assert page.evaluate("window.pwned") is None


def test_text_in_charts_can_be_read_and_stays_inside(open_page: OpenPage) -> None:
    for size in (DESKTOP, SMALL_PHONE):
        page = open_page(pages()["eval"], size=size)
        found = page.evaluate(
            """() => [...document.querySelectorAll("figure svg")].map((svg) => {
                 const box = svg.getBoundingClientRect();
                 const texts = [...svg.querySelectorAll("text")];
                 const scale = box.width / svg.viewBox.baseVal.width;
                 return [scale * 11, texts.filter((text) => {
                   const own = text.getBoundingClientRect();
                   return own.left < box.left - 1 || own.right > box.right + 1
                     || own.top < box.top - 1 || own.bottom > box.bottom + 1;
                 }).length];
               })"""
        )
        assert len(found) > 8
        assert all(9 <= pixels <= 17 and outside == 0 for pixels, outside in found), found


def test_colours_follow_the_scheme(open_page: OpenPage) -> None:
    seen: dict[str, list[str]] = {}
    for scheme in ("light", "dark"):
        page = open_page(pages()["eval"], scheme=scheme)
        seen[scheme] = look(page)
        other: Any = "dark" if scheme == "light" else "light"
        page.emulate_media(color_scheme=other)
        changed = look(page)
        assert all(a != b for a, b in zip(seen[scheme], changed, strict=True))
    light, dark = (sum(map(int, re.findall(r"\d+", seen[s][0])[:3])) for s in ("light", "dark"))
    assert light > 600 and dark < 150


def look(page: Page) -> list[str]:
    return page.evaluate(
        """() => [
          getComputedStyle(document.body).backgroundColor,
          getComputedStyle(document.querySelector("svg .path.s0")).stroke,
          getComputedStyle(document.querySelector("svg .mark.s1")).fill,
          getComputedStyle(document.querySelector("svg .path.ink")).stroke,
          getComputedStyle(document.querySelector("svg text")).fill,
          getComputedStyle(document.querySelector("svg .rule")).stroke,
        ]"""
    )


def test_lines_are_told_apart_without_colour(open_page: OpenPage) -> None:
    page = open_page(pages()["eval"])
    dashes = page.evaluate(
        """() => [...document.querySelectorAll(".legend")[0].querySelectorAll("li")].map((item) =>
             item.querySelector(".path").getAttribute("stroke-dasharray"))"""
    )
    assert len(dashes) == 1 + len(SCORES) and len(set(dashes[1:])) == len(SCORES)
    shapes = page.evaluate(
        """() => [...document.querySelectorAll(".legend")[0].querySelectorAll("li .mark")].map(
             (mark) => mark.tagName + (mark.getAttribute("d") || ""))"""
    )
    assert len(set(shapes)) == len(SCORES)


def test_what_is_drawn_has_names(open_page: OpenPage) -> None:
    page = open_page(pages()["eval"])
    image: Any = "img"
    main = page.get_by_role(image, name="Score by budget, all tasks").first
    assert main.is_visible()
    mark = main.get_attribute("aria-describedby")
    told = page.evaluate("(mark) => document.getElementById(mark).textContent", mark)
    assert told.startswith("mean score by budget. full cache: 1.00 (") and "span: 5% 0.25 (" in told
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("svg:not([aria-hidden])")].filter(
             (svg) => !svg.getAttribute("aria-label")).length"""
    )
    assert unnamed == 0
    tip = page.locator("figure svg").first.locator("g > title").first.text_content()
    assert tip == "span, 5%: 0.25 (0.09 – 0.53)"
    row: Any = "rowheader"
    assert page.get_by_role(row, name="span").first.is_visible()
    column: Any = "columnheader"
    assert page.get_by_role(column, name="25%").first.is_visible()


def test_tables_scroll_by_themselves_and_with_keys(open_page: OpenPage) -> None:
    page = open_page(pages()["eval"], size=SMALL_PHONE)
    box = page.locator(".scrolled").first
    assert box.evaluate("(box) => box.scrollWidth > box.clientWidth")
    box.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.querySelector('.scrolled').scrollLeft > 0")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"


def test_points_lie_where_their_figures_say(open_page: OpenPage) -> None:
    """In pixels, against the ticks of the axis."""
    page = open_page(pages()["eval"])
    scale, marks = page.evaluate(
        """() => {
          const svg = document.querySelector("figure svg");
          const middle = (node) => { const box = node.getBoundingClientRect();
                                     return box.top + box.height / 2; };
          const rules = [...svg.querySelectorAll(".rule")].slice(0, 5).map(middle);
          return [rules, [...svg.querySelectorAll("circle.mark.s0")].map(middle)];
        }"""
    )
    zero, one = scale[0], scale[4]
    shown = [(mark - zero) / (one - zero) for mark in marks]
    assert shown == pytest.approx(list(SCORES["span"]), abs=0.01)


def test_names_from_the_data_are_shown_as_text(open_page: OpenPage) -> None:
    page = open_page(nasty_pages()[0])
    assert page.locator("h1").inner_text() == f"kvkeep eval: {NASTY}"
    assert page.evaluate("document.querySelectorAll('script, img').length") == 0
    assert page.evaluate("window.pwned") is None
