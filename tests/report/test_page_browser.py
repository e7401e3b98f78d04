"""The page in Chromium: its controls work, its numbers are its data's, it asks for nothing, its console is silent."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
from playwright.sync_api import Browser, Error, Page
from tests.browser import Seen, watched
from tests.report.conftest import Made

from holdover.report.html.held import RECOMPUTE
from holdover.units import format_bytes


@pytest.fixture
def seen(browser: Browser, made: Made) -> Iterator[Seen]:
    """A freshly opened page; whatever a test did with it, it said nothing and asked for nothing."""
    found = watched(browser)
    found.page.goto(made.path.as_uri())
    found.page.wait_for_selector("html[data-ready=yes]")
    yield found
    found.page.close()
    assert found.errors == []
    assert [url for url in found.requests if not url.startswith("data:")] == [made.path.as_uri()]


@pytest.fixture
def page(seen: Seen) -> Page:
    return seen.page


def bytes_of(page: Page, selector: str) -> list[int]:
    found: list[int] = page.eval_on_selector_all(selector, "list => list.map((e) => Number(e.dataset.bytes))")
    return found


def legend(page: Page) -> list[int]:
    return bytes_of(page, "#memory-legend [data-bytes]")


def run_at(page: Page, x: float) -> tuple[float, float]:
    """A point of the memory chart, `x` of its width from the left."""
    box = page.locator("#memory .chart svg").bounding_box()
    assert box is not None
    return box["x"] + x * box["width"], box["y"] + box["height"] / 2


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_the_figures_at_the_head(page: Page, made: Made) -> None:
    for key in ("peak_bytes", "weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes"):
        figure = page.locator(f"[data-figure={key}]")
        assert figure.get_attribute("data-bytes") == str(made.data[key])
        assert format_bytes(made.data[key]) in figure.inner_text()
    assert page.title() == "GPT: memory of a training step"


def test_bytes_are_written_as_everywhere(page: Page) -> None:
    shown = page.eval_on_selector_all("[data-bytes]", "list => list.map((e) => [e.dataset.bytes, e.textContent])")
    written = [(int(n), text) for n, text in shown if text.strip().endswith(("B", "iB"))]
    assert len(written) > 20
    assert [(n, text) for n, text in written if format_bytes(n) not in text] == []


def test_the_stack_is_what_the_layers_keep(page: Page, made: Made) -> None:
    keep = [layer["saved_bytes"] for layer in made.data["layers"] if layer["saved_bytes"]]
    assert bytes_of(page, "#stack rect[data-layer]") == keep
    assert bytes_of(page, "#stack-total") == [made.data["activations_bytes"]]


def test_the_legend_shows_the_peak_and_its_parts(page: Page, made: Made) -> None:
    *parts, total = legend(page)
    assert total == sum(parts) == made.data["plain"]["peak"]["bytes"]
    page.get_by_label("with the plan", exact=True).check()
    *parts, total = legend(page)
    assert total == sum(parts) == made.data["plans"][made.data["chosen"]]["peak"]["bytes"]


# -- controls ---------------------------------------------------------------------------------------------------------


def evaluated(scaling: dict[str, Any], batch: int, seq: int) -> list[int]:
    return [
        sum(c * batch**i * seq**j for i, row in enumerate(rows) for j, c in enumerate(row)) // scaling["denominator"]
        for rows in scaling["layers"]
    ]


def test_sizes_change_the_stack_and_leave_the_weights(page: Page, made: Made) -> None:
    fixed = bytes_of(page, "#stack-fixed [data-bytes]")
    height = page.locator("#stack rect[fill='var(--parameter)']").get_attribute("height")
    page.get_by_label("batch size", exact=True).last.fill("5")
    page.get_by_label("sequence length", exact=True).last.fill("20")
    assert bytes_of(page, "#stack rect[data-layer]") == [n for n in evaluated(made.data["scaling"], 5, 20) if n]
    assert bytes_of(page, "#stack-fixed [data-bytes]") == fixed
    assert page.locator("#stack rect[fill='var(--parameter)']").get_attribute("height") == height
    page.locator("#size-depth").fill("2")
    blocks = made.data["scaling"]["blocks"]
    expected = [n for i, n in enumerate(evaluated(made.data["scaling"], 5, 20)) if n and i not in blocks[2:]]
    assert bytes_of(page, "#stack rect[data-layer]") == expected
    page.locator("#size-batch").fill("100000")  # beyond what was recorded: the most there is
    page.get_by_role("button", name="back to the recorded size").click()
    assert bytes_of(page, "#stack-total") == [made.data["activations_bytes"]]


def test_the_budget_changes_plan_bound_tree_and_flips(page: Page, made: Made) -> None:
    data = made.data
    budget = page.get_by_label("Memory budget", exact=True)
    last = len(data["plans"]) - 1
    for key, number in (("Home", last), ("ArrowRight", last - 1), ("End", 0)):
        budget.press(key)
        plan = data["plans"][number]
        assert bytes_of(page, "#budget-text") == [plan["peak_bytes"]]
        text = page.locator("#budget-text").inner_text()
        if number:
            assert f"extra time +{plan['extra_time']:.1%}".replace("%", " %") in text
            assert f"at least +{plan['bound_extra_time']:.1%}".replace("%", " %") in text
        dropped = sum(
            n for n, s in zip(data["held"]["bytes"], plan["held"], strict=True) if data["states"][s] == RECOMPUTE
        )
        shown = page.eval_on_selector_all(
            "#tree > ul > li > .line [data-dropped]", "l => l.map(e => +e.dataset.dropped)"
        )
        assert sum(shown) == dropped
    assert page.locator("#flips").inner_text().startswith("Nothing is dropped.")


def test_flipped_values_are_marked_in_the_tree(page: Page, made: Made) -> None:
    page.get_by_role("button", name="Open what flipped").click()
    chosen = made.data["chosen"]
    before, now = made.data["plans"][chosen - 1]["held"], made.data["plans"][chosen]["held"]
    flips = [i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b]
    marked = page.eval_on_selector_all(
        "#tree li.flip[data-held]", "l => l.map((e) => [+e.dataset.held, e.dataset.state])"
    )
    assert sorted(marked) == [[i, made.data["states"][now[i]]] for i in flips]


def test_a_plan_is_chosen_in_the_chart(page: Page, made: Made) -> None:
    wanted = len(made.data["plans"]) - 2
    page.locator(f"#frontier circle[data-plan='{wanted}']").scroll_into_view_if_needed()
    box = page.locator(f"#frontier circle[data-plan='{wanted}']").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] / 2 + 0.5, box["y"] + box["height"] / 2)
    assert bytes_of(page, "#budget-text") == [made.data["plans"][wanted]["peak_bytes"]]
    policies = page.eval_on_selector_all("#frontier [data-policy]", "l => l.map((e) => e.dataset.policy)")
    assert policies == [p["name"] for p in made.data["policies"]]


def test_pointing_reads_the_curve(page: Page, made: Made) -> None:
    page.locator("#memory .chart svg").scroll_into_view_if_needed()
    page.mouse.move(*run_at(page, 0.3))
    run = int(page.locator("#memory .chart svg").get_attribute("aria-valuenow") or -1)
    live = list(accumulate(made.data["plain"]["live"]))
    *parts, total = legend(page)
    assert total == sum(parts) == live[run]
    assert page.locator("#memory-when").inner_text() == "Here"
    page.mouse.move(5, 5)
    assert legend(page)[-1] == max(live)


def test_a_span_tells_what_lives_there(page: Page, made: Made) -> None:
    data = made.data
    page.locator("#memory .chart svg").scroll_into_view_if_needed()
    page.mouse.move(*run_at(page, 0.4))
    page.mouse.down()
    page.mouse.move(*run_at(page, 0.5), steps=3)
    page.mouse.up()
    words = page.locator("#span-title").inner_text().split()
    first, end = int(words[2].replace(",", "")), int(words[5].replace(",", ""))
    storages = data["storages"]
    begins = list(accumulate(storages["from"]))
    assert storages["again"] == {}
    there = [
        n
        for n, a, length in zip(storages["bytes"], begins, storages["length"], strict=True)
        if a <= end and a + length >= first
    ]
    assert page.locator("#span-list p").inner_text().startswith(f"{len(there)} tensors made in the step live here")
    assert bytes_of(page, "#span-list td[data-bytes]") == sorted(there, reverse=True)[:25]
    page.get_by_role("button", name="Zoom to the span").click()
    assert page.get_by_role("button", name="Whole step").is_enabled()
    page.keyboard.press("Escape")
    assert page.get_by_role("button", name="Whole step").is_disabled()
    assert page.locator("#span").is_hidden()


def test_the_memory_chart_by_keyboard(page: Page) -> None:
    chart = page.get_by_role("slider", name="Moment of the step")
    chart.focus()
    chart.press("Home")
    assert chart.get_attribute("aria-valuenow") == "0"
    chart.press("Shift+ArrowRight")
    chart.press("Shift+ArrowRight")
    assert chart.get_attribute("aria-valuenow") == "2"
    assert page.locator("#span-title").inner_text().startswith("From op 0 to op 2 (forward)")
    assert "of memory" not in (chart.get_attribute("aria-valuetext") or "of memory")


def test_the_life_of_a_tensor(page: Page, made: Made) -> None:
    data = made.data
    plan = data["plans"][data["chosen"]]
    choices = page.get_by_label("Tensors held from forward to backward", exact=True)
    dropped = next(i for i, s in enumerate(plan["held"]) if data["states"][s] == RECOMPUTE)
    kept = next(i for i, s in enumerate(plan["held"]) if data["states"][s] == "keep")
    choices.select_option(str(dropped))
    assert bytes_of(page, "#life-bytes") == [data["held"]["bytes"][dropped]]
    events = page.locator("#life-events").inner_text()
    order = [events.index(word) for word in ("made by", "dropped", "made again", "needed in backward", "freed")]
    assert order == sorted(order)
    assert "made again when backward asks" in page.locator("#life-choice").inner_text()
    assert page.locator("#life rect[data-lane='as it is']").count() == 1
    assert page.locator("#life rect[data-lane='with the plan']").count() > 1
    choices.select_option(str(kept))
    assert page.locator("#life-choice").inner_text().startswith("kept")
    assert "made again" not in page.locator("#life-events").inner_text()
    page.get_by_label("Find a tensor").fill("gelu")
    assert (
        choices.locator("option").count() == sum("gelu" in o for o in choices.locator("option").all_inner_texts()) > 0
    )


def test_tables_sort_and_add_up(page: Page, made: Made) -> None:
    heading = page.locator("#table thead button", has_text="saved")
    heading.click()
    assert page.locator("#table th[aria-sort=descending]").inner_text().startswith("saved")
    column = bytes_of(page, "#table tbody td:nth-child(4)")
    assert column == sorted(column, reverse=True)
    heading.click()
    assert bytes_of(page, "#table tbody td:nth-child(4)") == sorted(column)
    assert bytes_of(page, "#table tfoot td:nth-child(4)") == [sum(column)] == [made.data["activations_bytes"]]
    page.get_by_label("tensors", exact=True).check()
    assert bytes_of(page, "#table tfoot [data-bytes]") == [made.data["activations_bytes"]]
    page.get_by_label("kinds of op", exact=True).check()
    assert bytes_of(page, "#table tfoot td:nth-child(3)") == [made.data["activations_bytes"]]


# -- for everybody ----------------------------------------------------------------------------------------------------


def test_every_control_has_a_name_and_every_chart_a_table(page: Page) -> None:
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("input, select, button, svg, [role]")].filter((e) => {
          if (e.closest("svg") && e.tagName !== "svg") return false;
          const label = e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.textContent.trim()
            || [...(e.labels ?? [])].some((l) => l.textContent.trim());
          return !label && e.getAttribute("role") !== "status" && e.type !== "hidden";
        }).map((e) => e.outerHTML.slice(0, 120))"""
    )
    assert nameless == []
    for section in ("stack", "memory", "frontier"):
        page.locator(f"#{section} details.alternative > summary").click()
        page.locator(f"#{section} details.alternative tbody tr").nth(1).wait_for()
    assert page.evaluate("document.documentElement.lang") == "en"


def test_a_keyboard_reaches_everything_and_the_focus_is_seen(page: Page) -> None:
    reached = set()
    for _ in range(200):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        if page.evaluate("document.activeElement === document.body"):
            break
    assert {"budget", "size-batch", "svg", "life-search", "life-list", "tree-flips"} <= reached


def test_light_and_dark_differ_and_are_legible(browser: Browser, made: Made) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        seen = watched(browser, scheme=scheme)
        seen.page.goto(made.path.as_uri())
        seen.page.wait_for_selector("html[data-ready=yes]")
        style = "(() => { const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]; })()"
        colours[scheme] = seen.page.evaluate(style)
        assert seen.errors == []
        seen.page.close()
    for colour, ground in colours.values():
        assert contrast(colour, ground) > 12
    assert luminance(colours["light"][1]) > 0.9 > 0.1 > luminance(colours["dark"][1])


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    channels = [int(c) / 255 for c in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_it_fits_a_narrow_screen(browser: Browser, made: Made) -> None:
    seen = watched(browser, width=400)
    seen.page.goto(made.path.as_uri())
    seen.page.wait_for_selector("html[data-ready=yes]")
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 400
    assert seen.errors == []
    seen.page.close()


def test_it_prints_without_its_controls(page: Page) -> None:
    page.emulate_media(media="print")
    assert not page.get_by_role("button", name="Close all").is_visible()
    assert page.locator("#memory .chart svg").is_visible()
    assert len(page.pdf()) > 10_000


def test_the_page_may_ask_for_nothing(browser: Browser, made: Made) -> None:
    seen = watched(browser)
    seen.page.goto(made.path.as_uri())
    with pytest.raises(Error, match="Failed to fetch"):
        seen.page.evaluate("fetch('http://127.0.0.1:9/')")
    assert "Content Security Policy" in seen.errors[0]
    seen.page.close()


def test_an_estimates_page_has_what_needs_no_plan(browser: Browser, made: Made) -> None:
    path = made.path.with_name("estimate.html")
    path.write_text(made.estimate.to_html())
    seen = watched(browser)
    seen.page.goto(path.as_uri())
    seen.page.wait_for_selector("html[data-ready=yes]")
    assert seen.page.locator("#frontier, #budget, .needs-plans").count() == 0
    assert legend(seen.page)[-1] == made.estimate.later_step_peak_bytes
    assert seen.page.locator("#life-events li").count() >= 3
    assert seen.errors == []
    seen.page.close()
