"""The page of `kvkeep inspect` in a browser: what it shows is what the library keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx_lm
import numpy as np
import pytest

from browser import DESKTOP, PHONE, OpenPage, overflow
from inspections import made_up
from kvkeep import EvictionConfig
from kvkeep.inspecting import BUDGETS, Inspection, inspect_prompt, render_html
from kvkeep.spec import LayerSelection, Selection
from tiny_folder import write_tiny_folder

if TYPE_CHECKING:
    from playwright.sync_api import Page

NASTY = (
    "</script><script>window.pwned=1</script> <img src=x onerror=window.pwned=2>\n"
    "<!-- <svg onload=window.pwned=3> &lt; ${window.pwned=4} {{5}} '\"`\\\n"
    "def f(x):\n\treturn x  # 漢字 naïve e\u0301 👩\u200d💻 🇩🇪\n\n"
    "שלום עולם مرحبا\u2028end\u2029\0\x1b[31m\u202eabc\u202c\ufeff.\r\n"
)


@pytest.fixture(scope="module")
def inspection(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    """Of a tiny model that reads bytes, with heads that keep unequal numbers of rows."""
    folder = write_tiny_folder(tmp_path_factory.mktemp("inspect") / "model", every_byte=True)
    loaded: Any = mlx_lm.load(str(folder))
    config = EvictionConfig(
        policy="span", allocation="adaptive", budget="30%", min_tokens=0, recent_tokens=8
    )
    name = '<b>tiny</b> & "co"'
    return inspect_prompt(
        loaded[0], loaded[1], NASTY, config, name=name, budgets=["10%", "30%", "55%", "80%"]
    )


def units_of(found: Inspection) -> Iterator[tuple[int, int, str]]:
    """(first position, one after the last, text) of each unit."""
    start = 0
    for unit in found.units:
        yield start, start + unit.tokens, unit.text
        start += unit.tokens


def expected_marks(found: Inspection, share: np.ndarray) -> list[str]:
    """What the text should say of shares [T]: "k0", "k4", or "some"; "last" of the last token."""
    marks = []
    for start, stop, _ in units_of(found):
        own = share[start : min(stop, found.positions)]
        if len(own) == 0:
            marks.append("last")
        else:
            marks.append("k4" if own.min() == 1 else "k0" if own.max() == 0 else "some")
    return marks


MARKS = """() => {
  window.dispatchEvent(new Event("beforeprint"));  // paints what is out of view, too
  return [...document.querySelectorAll("#text .u")].map((node) => {
    const classes = [...node.classList];
    return classes.find((name) => /^k[04]$|^last$/.test(name)) || "some";
  });
}"""
SHADES = """() => {
  window.dispatchEvent(new Event("beforeprint"));
  return [...document.querySelectorAll("#text .u:not(.last)")].map(
    (node) => Number([...node.classList].find((name) => /^s[0-7]$/.test(name)).slice(1)));
}"""


def share_of(found: Inspection, layer: int | None, head: int | None, rung: int) -> np.ndarray:
    layers = range(len(found.layers)) if layer is None else [layer]
    rows = [found.kept(at, rung) for at in layers]
    return np.mean([row.mean(0) if head is None else row[head] for row in rows], axis=0)


def choose(page: Page, layer: int | None = None, head: int | None = None) -> None:
    page.select_option("#layer", str(-1 if layer is None else layer))
    page.select_option("#head", str(-1 if head is None else head))


def test_the_text_is_the_prompt_and_nothing_of_it_runs(
    inspection: Inspection, open_page: OpenPage
) -> None:
    page = open_page(render_html(inspection))
    assert page.evaluate("window.pwned") is None
    assert page.locator("#text img, #text svg, #text script, b").count() == 0
    shown = page.evaluate(
        """() => [...document.querySelectorAll("#text .u")].map((node) => {
          const copy = node.cloneNode(true);
          copy.querySelectorAll(".sign").forEach((sign) => sign.remove());
          return copy.textContent;
        })"""
    )
    unseen = dict.fromkeys(map(ord, "\0\x1b\r\u2028\u2029\u202e\u202c\ufeff"))
    assert shown == [text.translate(unseen) for _, _, text in units_of(inspection)]
    assert "".join(text for _, _, text in units_of(inspection)).endswith(NASTY)
    signs = page.evaluate("[...document.querySelectorAll('#text .sign')].map(s => s.textContent)")
    assert {"⟨00⟩", "⟨1B⟩", "⟨0D⟩", "↵", "⟨2028⟩", "⟨202E⟩", "⟨FEFF⟩"} <= {*signs}
    assert "👩\u200d💻" in shown and "🇩🇪" in shown and "e\u0301" in shown
    page.click("summary >> nth=0")
    assert page.locator(".figures dd").first.inner_text() == '<b>tiny</b> & "co"'


def test_marks_are_the_selection_for_each_layer_head_and_budget(
    inspection: Inspection, open_page: OpenPage
) -> None:
    page = open_page(render_html(inspection))
    slider = page.locator("#budget")
    assert slider.input_value() == str(inspection.asked)
    counts = {found.selection.layers[0].counts for found in inspection.rungs}
    assert any(len(set(row)) > 1 for row in counts)  # heads do differ here
    slider.focus()
    page.keyboard.press("Home")
    for rung in range(len(inspection.rungs)):
        assert slider.input_value() == str(rung)
        page.wait_for_function(
            "(label) => document.getElementById('budget-words').textContent.startsWith(label)",
            arg=str(inspection.rungs[rung].budget),
        )
        for layer in (0, 1, None):
            for head in (0, 1, None):
                choose(page, layer, head)
                expected = expected_marks(inspection, share_of(inspection, layer, head, rung))
                assert page.evaluate(MARKS) == expected
        assert {"k0", "k4", "last"} <= set(
            expected_marks(inspection, share_of(inspection, 0, 0, rung))
        )
        slider.focus()
        page.keyboard.press("ArrowRight")
    page.click("#asked")
    assert slider.input_value() == str(inspection.asked)
    assert page.locator("#asked").is_disabled()


def test_budgets_that_give_rows_up_again_are_shown_as_they_are(open_page: OpenPage) -> None:
    found = made_up([f"{i} " for i in range(51)], layers=2)
    random = np.random.default_rng(3)
    rungs = []
    for rung in found.rungs:
        kept = {
            layer: LayerSelection(
                tuple(np.sort(random.choice(50, int(rung.rows), replace=False)) for _ in range(2))
            )
            for layer in range(2)
        }
        rungs.append(replace(rung, selection=Selection(50, kept)))
    found = replace(found, rungs=tuple(rungs))
    page = open_page(render_html(found))
    for rung in range(4):
        page.locator("#budget").fill(str(rung))
        page.wait_for_function(f"() => document.getElementById('budget').value === '{rung}'")
        page.wait_for_timeout(50)
        choose(page, 1, 1)
        assert page.evaluate(MARKS) == expected_marks(found, share_of(found, 1, 1, rung))


def test_one_set_for_all_heads(open_page: OpenPage) -> None:
    found = made_up([f"{i} " for i in range(41)], layers=2, heads=1)
    found = replace(found, layers=tuple(replace(layer, heads=4) for layer in found.layers))
    page = open_page(render_html(found))
    assert page.locator("#head option").count() == 5
    for head in (None, 0, 3):
        choose(page, 0, head)
        share = found.kept(0)[0].astype(float)
        assert page.evaluate(MARKS) == expected_marks(found, share)
    page.click("#text .u >> nth=3")
    kept = 4 * sum(bool(found.kept(at)[0, 3]) for at in range(2))
    assert page.locator("#r-kept").inner_text().startswith(f"{kept} of 8 heads")


def test_shades_follow_rank_or_score(open_page: OpenPage) -> None:
    found = made_up([f"{i} " for i in range(201)], layers=1, heads=1)
    page = open_page(render_html(found))
    scores = found.layers[0].scores[0].astype(np.float64)
    rank = np.argsort(np.argsort(scores)) / 200
    assert np.abs(np.array(page.evaluate(SHADES)) - np.minimum(rank * 8, 7)).max() <= 1.1
    page.check("input[value=score]")
    height = (scores - scores.min()) / np.ptp(scores)
    assert np.abs(np.array(page.evaluate(SHADES)) - np.floor(np.minimum(height * 8, 7))).max() <= 1


def test_the_map_tells_and_leads_to_the_token(open_page: OpenPage) -> None:
    found = made_up([f"word{i}\n" for i in range(301)], layers=3)
    page = open_page(render_html(found))
    area = page.evaluate(
        """() => { const box = document.getElementById("map").getBoundingClientRect();
                   return [box.left, box.top, box.width, box.height]; }"""
    )
    left, top = area[0] + 34, area[1] + 6
    wide, high = area[2] - 36, area[3] - 26
    for layer, position in ((0, 0), (1, 200), (2, 299)):
        page.mouse.move(left + (position + 0.5) / 300 * wide, top + (layer + 0.5) / 3 * high)
        assert page.locator("#r-position").inner_text().startswith(f"{position} (id {position}")
        assert page.locator("#r-where").inner_text() == f"Layer {layer}, all heads"
        own = found.kept(layer)[:, position]
        fate = "kept;" if own.all() else "kept by 1 of 2;" if own.any() else "evicted;"
        assert page.locator("#r-score").inner_text().startswith(fate)
        assert page.locator("#r-token").inner_text().startswith(f"word{position}")
    assert page.evaluate("window.scrollY") == 0
    page.mouse.click(left + 200.5 / 300 * wide, top + 10)
    assert page.locator("#text .at").inner_text().startswith("word200")
    page.wait_for_function("() => window.scrollY > 500")
    place = page.evaluate("document.querySelector('#text .at').getBoundingClientRect().top")
    assert 0 < place < DESKTOP[1]
    score = found.layers[0].scores[0, 200]
    choose(page, 0, 0)
    said = page.locator("#r-score").inner_text()
    shown = float(said.split("≈ ")[1].split(",")[0])
    assert shown == pytest.approx(float(score), abs=float(np.ptp(found.layers[0].scores[0])) / 100)


def test_where_a_token_stays_from(open_page: OpenPage) -> None:
    found = made_up([f"{i} " for i in range(101)], layers=1, heads=1)
    page = open_page(render_html(found))
    firsts = [min(r for r in range(5) if r == 4 or found.kept(0, r)[0, t]) for t in range(100)]
    for position in (firsts.index(0), firsts.index(2), firsts.index(4)):
        page.click(f"#text .u >> nth={position}")
        said = page.locator("#r-score").inner_text()
        if firsts[position] == 4:
            assert said.endswith("stays at none of these budgets")
        else:
            assert said.endswith(f"stays from {found.rungs[firsts[position]].budget} on")


def test_everything_can_be_done_with_keys(inspection: Inspection, open_page: OpenPage) -> None:
    page = open_page(render_html(inspection))
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none"
        if seen[-1] == "text":
            break
    assert seen == ["layer", "head", "INPUT", "budget", "map", "SUMMARY", "SUMMARY", "text"]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    text = inspection.units[0].text
    assert page.evaluate("document.querySelector('.at').textContent") == text
    assert f"Token {text}." in page.locator("#said").inner_text()
    page.focus("#map")
    for key, row in (("ArrowDown", 1), ("ArrowUp", 0), ("ArrowUp", 0)):
        page.keyboard.press(key)
        assert page.locator("#r-where").inner_text().startswith(f"Layer {row}")
    page.keyboard.press("End")
    assert f"Position {inspection.positions - 1}" in page.locator("#said").inner_text()
    page.keyboard.press("Home")
    position = 0
    for start, _, _ in list(units_of(inspection))[1:40]:  # whole units, also of several tokens
        page.keyboard.press("ArrowRight")
        assert start > position
        position = start
        assert page.locator("#r-position").inner_text().startswith(f"{position:,} (id")
    page.keyboard.press("Enter")
    page.focus("#layer")
    page.keyboard.press("ArrowDown")
    assert page.input_value("#layer") == "0"


def test_controls_have_names(inspection: Inspection, open_page: OpenPage) -> None:
    page = open_page(render_html(inspection))
    for role, name in (
        ("combobox", "Layer"),
        ("combobox", "KV head"),
        ("slider", "Budget"),
        ("group", "Shade by"),
        ("radio", "rank"),
        ("application", "Map of layers by positions"),
        ("region", "The prompt's text"),
        ("heading", "The prompt"),
        ("list", "Colours"),
    ):
        role_: Any = role
        assert page.get_by_role(role_, name=name).first.is_visible(), (role, name)
    words = page.locator("#budget").get_attribute("aria-valuetext")
    assert words is not None and words.startswith("30%: rows kept ")
    assert page.locator("html").get_attribute("lang") == "en"


def test_rows_per_layer_and_head_are_listed(inspection: Inspection, open_page: OpenPage) -> None:
    page = open_page(render_html(inspection))
    page.click("summary >> nth=1")
    for rung in (0, inspection.asked):
        page.locator("#budget").fill(str(rung))
        kept = inspection.rungs[rung].selection.layers
        expected = [
            ["layer", "head 0", "head 1"],
            *([str(at), *(f"{count:,}" for count in kept[at].counts)] for at in (0, 1)),
        ]
        page.wait_for_function(
            """(rows) => JSON.stringify(rows) === JSON.stringify(
                 [...document.querySelectorAll("#counts tr")].map(
                   (row) => [...row.children].map((cell) => cell.textContent)))""",
            arg=expected,
        )


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_any_window_in_both_schemes(
    size: tuple[int, int], scheme: str, inspection: Inspection, open_page: OpenPage
) -> None:
    page = open_page(render_html(inspection), size=size, scheme=scheme, touch=size == PHONE)
    assert overflow(page) <= 0
    for index in range(2):
        page.locator("summary").nth(index).click()
    assert overflow(page) <= 0
    paper, ink = page.evaluate(
        """() => { const style = getComputedStyle(document.body);
                   return [style.backgroundColor, style.color]; }"""
    )
    bright = [sum(map(int, colour[4:-1].split(","))) for colour in (paper, ink)]
    assert (bright[0] > bright[1]) == (scheme == "light")
    pixel = page.evaluate(
        """() => [...document.getElementById("map").getContext("2d")
                 .getImageData(200, 20, 1, 1).data]"""
    )
    assert pixel[3] == 255
    unit = page.locator("#text .u").nth(5)
    unit.scroll_into_view_if_needed()
    if size == PHONE:
        unit.tap()
    else:
        unit.click()
    reading = page.locator(".reading").bounding_box()
    assert (
        reading is not None and 0 <= reading["y"] < size[1]
    )  # what was pointed at is told in view
    assert overflow(page) <= 0


def test_the_scheme_can_change_under_way(inspection: Inspection, open_page: OpenPage) -> None:
    page = open_page(render_html(inspection))
    shot = "document.getElementById('map').toDataURL()"
    before = page.evaluate(shot)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"(before) => {shot} !== before", arg=before)


def test_eight_thousand_tokens_switch_at_once(open_page: OpenPage) -> None:
    """From the change to the next frame; the best of six, as other work may share the machine."""
    random = np.random.default_rng(0)
    words = ("the ", "log", "of ", " harbour", " 漢", "x", "(", ")\n", "\n\n")
    texts = [words[i] for i in random.integers(0, len(words), 8193)]
    html = render_html(made_up(texts, layers=30, heads=3, shares=BUDGETS))
    assert len(html) < 3e6
    page = open_page(html)
    for select, values in (("layer", range(6)), ("head", (0, 1, 2, 0, 1, 2))):
        times = page.evaluate(
            """async ([id, values]) => {
              const frame = () => new Promise((done) =>
                requestAnimationFrame(() => setTimeout(done, 0)));
              const select = document.getElementById(id);
              const times = [];
              for (const value of values) {
                await frame();
                const start = performance.now();
                select.value = String(value);
                select.dispatchEvent(new Event("change"));
                await frame();
                times.push(performance.now() - start);
              }
              return times;
            }""",
            [select, list(values)],
        )
        assert min(times) < 100, times
    # Far down it is painted when it comes into view.
    far = "document.getElementById('text').lastElementChild.previousElementSibling"
    page.evaluate(f"{far}.scrollIntoView()")
    page.wait_for_function(f"() => {far}.querySelector('.k0, .k4')")
