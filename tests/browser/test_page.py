"""The router's page in a real browser, on any screen, with and without a mouse or scripts."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from kvferry.router.api import Limits
from kvferry.router.choice import Decision, Option, reason
from kvferry.router.live import CacheNow
from live_fleet import Fleet, Served, an_incident
from router_process import router_process

HOSTILE = "<img/src=x/onerror=alert(1)>'\"</script><script>alert(2)</script>&amp;"
# The least contrast of all texts of a page, as WCAG defines it, and the text that has it.
LEAST_CONTRAST = """() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const part = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length === 3) return colour;  // without an alpha: opaque
    }
    return [255, 255, 255];
  };
  let least = [99, ""];
  const walk = document.createTreeWalker(document.querySelector("#app"), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !e.getBoundingClientRect().width) continue;
    if (e.closest("svg")) continue;
    const a = light(parse(getComputedStyle(e).color)), b = light(ground(e));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < least[0]) least = [contrast, walk.currentNode.data];
  }
  return least;
}"""
WATCH_SHIFTS = """() => {
  window.shifts = [];
  const named = (node) => node && (node.id || node.className || node.nodeName);
  const watch = new PerformanceObserver((list) => list.getEntries().forEach((e) => {
    window.shifts.push([e.value, e.sources.map((s) => named(s.node)).join(" ")]);
  }));
  watch.observe({ type: "layout-shift", buffered: true });
}"""

Serve = Callable[..., Served]
Open = Callable[..., Any]


def text(page: Any, selector: str) -> str:
    return str(page.locator(selector).first.inner_text())


def until(page: Any, condition: str, argument: object = None) -> None:
    page.wait_for_function(condition, arg=argument)


def test_it_follows_the_fleet_without_a_reload(served: Serve, open_page: Open) -> None:
    at = served()
    page = open_page(at.url)
    page.evaluate("window.same = true")
    assert text(page, "#state") == "All well"
    assert text(page, "#problems li .what").startswith("Nothing is wrong.")
    url = list(at.fleet.engines)[-1]
    name = url.removeprefix("http://")
    at.do(lambda: at.fleet.change(url, up=False, reason="cannot connect: refused"))
    until(page, "() => document.querySelector('#state').textContent.startsWith('Degraded ')")
    assert text(page, "#problems li .what") == (
        f"{name}: Down: cannot connect: refused. 2 other decode engines are up."
    )
    assert "since" in text(page, "#problems li .since")
    assert page.title().startswith("▲ 1 ")
    assert text(page, "#changes li .text") == f"{name} down: cannot connect: refused"
    row = page.locator("#engine-rows tr").first  # what is down comes first
    assert row.locator("td").first.inner_text() == name
    assert "down" in row.locator("td").nth(2).inner_text()
    assert page.locator("#boxes .node.down text").first.text_content() == name
    at.do(lambda: at.fleet.change(url, up=True, reason=""))
    until(page, "() => document.querySelector('#state').textContent === 'All well'")
    assert "The last trouble was" in text(page, "#problems li .what")
    assert text(page, "#no-failure") == "None yet."
    at.do(lambda: at.fleet.end("engine_error", None, f"decode engine {url}: HTTP 500"))
    until(page, "() => document.querySelectorAll('#failure-rows tr').length === 1")
    assert f"decode engine {url}: HTTP 500" in text(page, "#failure-rows tr")
    assert page.evaluate("window.same") is True


def test_numbers_are_the_states(served: Serve, open_page: Open) -> None:
    fleet = Fleet(stands_still=True)
    fleet.pass_time(90)
    at = served(fleet, traffic=False)
    page = open_page(at.url)
    state = httpx.get(at.url + "live", trust_env=False).json()
    hits = state["hit_tokens"]
    share = 1 - hits["none"] / sum(hits.values())
    assert text(page, "#hit") == f"{100 * share:.0f} %"
    assert text(page, "#p50") == f"{state['latency']['first_token_ms']['p50']:.0f} ms"
    assert page.locator("#decisions > tbody").count() == 12
    page.get_by_role("button", name="Show all 50").click()
    assert page.locator("#decisions > tbody").count() == 50
    # Each flow is a ribbon, and the widths are as the tokens.
    page.locator("#flow summary").click()
    assert page.locator("#flow-rows tr").count() == len(state["flows"])
    widths = page.evaluate(
        "() => Object.fromEntries([...document.querySelectorAll('#ribbons g')].map((g) => "
        "[g.querySelector('title').textContent.split(':').slice(0, -1).join(':'), "
        "+g.firstChild.getAttribute('stroke-width')]))"
    )
    flows = {
        (f["from"].removeprefix("http://"), f["to"].removeprefix("http://")): f["tokens_per_minute"]
        for f in state["flows"]
    }
    given = {k: v for k, v in flows.items() if ":8100" in k[0]}
    assert len(given) >= 4
    (a, most), *rest = sorted(given.items(), key=lambda item: -item[1])
    for b, tokens in rest:
        ratio = widths[f"{b[0]} → {b[1]}"] / widths[f"{a[0]} → {a[1]}"]
        assert ratio == pytest.approx(tokens / most, abs=0.05)


def test_it_says_that_it_is_stale_and_reconnects(served: Serve, open_page: Open) -> None:
    at = served()
    page = open_page(at.url, expect="Failed to load resource")
    page.evaluate("window.same = true")
    until(page, "() => document.querySelector('#fresh').textContent.startsWith('live ')")
    at.stop()
    until(page, "() => document.querySelector('#fresh').textContent.startsWith('No news for ')")
    assert "stale" in page.evaluate("document.documentElement.className")
    assert text(page, "#said") == "The page is stale: no news from the router."
    at.start()
    until(page, "() => document.querySelector('#fresh').textContent.startsWith('live ')")
    assert "stale" not in page.evaluate("document.documentElement.className")
    assert page.evaluate("window.same") is True


def test_without_a_place_in_the_stream_it_asks_now_and_then(served: Serve, open_page: Open) -> None:
    at = served(limits=Limits(max_viewers=1))
    first = open_page(at.url)
    until(first, "() => document.querySelector('#fresh').textContent.startsWith('live ')")
    page = open_page(at.url, expect="429")
    before = text(page, "#fresh")
    until(page, "(before) => document.querySelector('#fresh').textContent !== before", before)
    assert "stale" not in page.evaluate("document.documentElement.className")
    first.context.close()
    # It gets the place that the other one left, and a state each second.
    page.wait_for_timeout(6000)
    times = []
    for _ in range(3):
        page.wait_for_timeout(1100)
        times.append(text(page, "#fresh"))
    assert len(set(times)) == 3


def test_hostile_texts_are_shown_as_text(served: Serve, open_page: Open) -> None:
    fleet = Fleet(prefill=1, decode=2)
    for url in list(fleet.engines):
        engine = fleet.engines.pop(url)
        fleet.engines[url + HOSTILE] = msgspec.structs.replace(engine, url=url + HOSTILE)
    fleet.pass_time(10)
    url = list(fleet.engines)[-1]
    fleet.change(url, up=False, reason=HOSTILE)
    at = served(fleet, traffic=False)
    page = open_page(at.url, expect="TrustedHTML")  # of the attempt below
    at.do(lambda: fleet.place(HOSTILE))
    until(
        page,
        "(id) => document.querySelector('#decisions td:nth-child(2)').textContent === id",
        HOSTILE,
    )
    assert HOSTILE in text(page, "#problems li .what")
    page.locator("#decisions .fold").first.click()
    assert HOSTILE in page.locator("#decisions .more dd").first.inner_text()
    assert page.locator("img").count() == 0
    assert page.evaluate("document.scripts.length") == 2
    # Nothing that got into the page could run: its policy refuses what it has no hash of.
    refused = page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>'; return ''; } "
        "catch (error) { return error.name; } }"
    )
    assert refused == "TypeError"


def test_without_scripts_it_says_so(served: Serve, open_page: Open) -> None:
    page = open_page(served().url, java_script_enabled=False)
    assert "needs JavaScript" in page.locator("noscript").first.inner_html()
    assert not page.locator("#app").is_visible()


@pytest.mark.parametrize("width", [360, 320])
def test_on_a_phone(served: Serve, open_page: Open, shots: Path, width: int) -> None:
    fleet = Fleet()
    an_incident(fleet)
    at = served(fleet)
    page = open_page(at.url, width, 760, color_scheme="dark", device_scale_factor=2)
    until(page, "() => document.querySelector('#fresh').textContent.startsWith('live ')")
    page.locator("#decisions .fold").first.click()
    page.get_by_role("button", name="Show all 50").click()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    # Nothing reaches over the edge, except what is hidden from eyes on purpose.
    outside = page.evaluate(
        "(width) => [...document.querySelectorAll('#app *')].filter((e) => !e.closest('thead') && "
        "e.getBoundingClientRect().width > 1 && e.getBoundingClientRect().right > width + 1)"
        ".map((e) => e.tagName + '.' + e.className + ' ' + e.textContent.slice(0, 40))",
        width,
    )
    assert outside == []
    small = page.evaluate(
        "() => Math.min(...[...document.querySelectorAll('#app *')].filter((e) => e.textContent)"
        ".map((e) => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert small >= 10.5
    assert page.get_by_role("table", name="Engines").get_by_role("row").count() == 6
    assert "first token" in page.evaluate(
        "getComputedStyle(document.querySelectorAll('#engine-rows td')[6], '::after').content"
    )
    page.screenshot(path=shots / f"phone-{width}.png", full_page=True)


@pytest.mark.parametrize("width", [1280, 390])
def test_no_text_is_cut(served: Serve, open_page: Open, width: int) -> None:
    fleet = Fleet()
    an_incident(fleet)
    page = open_page(served(fleet, traffic=False).url, width)
    # Of a decision, the row is cut, and its details say all of it.
    cut = page.evaluate(
        "() => [...document.querySelectorAll('#app *')].filter((e) => e.offsetWidth > 1 && "
        "getComputedStyle(e).overflowX === 'hidden' && e.scrollWidth > e.clientWidth && "
        "!e.matches('#decisions td:not([data-label])'))"
        ".map((e) => e.tagName + '.' + e.className + ' ' + e.textContent)"
    )
    assert cut == []
    assert "…" not in page.locator("#boxes").text_content()


def test_a_decision_says_its_first_token_or_why_there_is_none(
    served: Serve, open_page: Open
) -> None:
    fleet = Fleet(stands_still=True)
    for seconds, outcome in ((0.25, "ok"), (None, "ok"), (0.25, "broken_stream"), (None, None)):
        option = Option("http://d:2", None, 0.2, {}, 0, "none")
        placed = fleet.live.decided("a", 10, Decision(option, (option,), ""))
        fleet.live.answered(placed, seconds, prefill=None, decode=option.decode)
        if outcome is not None:
            fleet.end(outcome, placed)
    page = open_page(served(fleet, traffic=False).url)
    cells = page.locator("#decisions > tbody > tr:first-child > td:nth-child(7)")
    assert cells.all_inner_texts() == ["…", "broken stream", "not streamed", "250 ms"]
    head = page.locator("#decisions th:nth-child(7)")
    assert head.inner_text() == cells.first.get_attribute("data-label") == "first token"
    page.locator("#decisions .fold").nth(2).click()
    assert "not timed: the answer was not streamed" in text(page, "#decisions .more:visible")


def test_why_begins_with_the_comparison(served: Serve, open_page: Open) -> None:
    fleet = Fleet(stands_still=True)
    alone = Option("http://d:2", None, 0.035, {}, 64, "local")
    handed = Option("http://d:2", "http://p:1", 0.402, {}, 0, "none")
    unknown = msgspec.structs.replace(alone, seconds=math.nan)
    fleet.live.decided("by load", 10, Decision(unknown, (), "by load"))
    for chosen, other in ((alone, handed), (handed, alone)):
        options = (chosen, other)
        fleet.live.decided("a", 90, Decision(chosen, options, reason(chosen, options)))
    page = open_page(served(fleet, traffic=False).url)
    cells = page.locator("#decisions > tbody > tr:first-child > td:nth-child(8)")
    assert cells.all_inner_texts() == [
        "402 ms handed over, 35 ms here at the cost of others; no engine that is free enough holds "
        "a part of it",
        "35 ms here, 402 ms handed over; 64 tokens are cached there",
        "by load",
    ]
    whole = "first token in 35 ms if http://d:2 computes it, in 402 ms with a hand-over; 64 tokens"
    page.locator("#decisions .fold").nth(1).click()
    assert whole in text(page, "#decisions .more:visible")
    assert str(cells.nth(1).get_attribute("title")).startswith(whole)


def test_draining_is_no_trouble(served: Serve, open_page: Open) -> None:
    fleet = Fleet()
    fleet.pass_time(5)
    url = next(iter(fleet.engines))
    fleet.change(url, draining=True)
    fleet.pass_time(1)
    fleet.change(url, draining=False)
    fleet.pass_time(1)
    page = open_page(served(fleet, traffic=False).url)
    assert page.locator("#changes li").nth(1).inner_text().endswith("draining")
    assert page.locator("#changes .bad").count() == 0
    assert text(page, "#problems li .what") == "Nothing is wrong."


@pytest.mark.parametrize("width", [1280, 390, 320])
def test_numbers_say_what_they_are(served: Serve, open_page: Open, width: int) -> None:
    fleet = Fleet()
    fleet.pass_time(90)
    page = open_page(served(fleet, traffic=False).url, width)
    tiles = [tile.replace("\n", " ") for tile in page.locator(".tile").all_inner_texts()]
    for tile, words in zip(
        tiles,
        (
            ("median, 5 min", "10 min, peak "),
            ("in the last minute", "10 min, peak ", "/min"),
            ("5 min",),
            ("median", "last 50 decisions", "router: median ", "expected", "actual"),
        ),
        strict=True,
    ):
        assert all(word in tile for word in words), tile
    cut = page.evaluate(
        "() => [...document.querySelectorAll('.tile, .tile *')].filter((e) => e.offsetWidth > 1 && "
        "getComputedStyle(e).overflowY === 'hidden' && (e.scrollHeight > e.clientHeight + 1 || "
        "e.scrollWidth > e.clientWidth)).map((e) => e.tagName + ' ' + e.textContent)"
    )
    assert cut == []
    short = page.evaluate(
        "() => Math.min(...[...document.querySelectorAll('.curve')]"
        ".map((e) => e.getBoundingClientRect().height))"
    )
    assert short >= 24
    clients = page.locator("#boxes .node", has_text="Clients").first
    assert "req/min" in clients.text_content()
    box, words = clients.locator("rect").bounding_box(), clients.locator("text").first
    inside = words.bounding_box()
    assert box["x"] <= inside["x"] and inside["x"] + inside["width"] <= box["x"] + box["width"]


def test_headings_of_engines_say_what_is_counted(served: Serve, open_page: Open) -> None:
    page = open_page(served().url)
    for heading in ("first token", "prefill tok/s", "step", "hits"):
        cell = page.get_by_role("columnheader", name=heading, exact=True).first
        assert len(str(cell.get_attribute("title"))) > 20, heading


def test_a_curve_ends_where_there_is_no_data(served: Serve, open_page: Open) -> None:
    fleet = Fleet(stands_still=True)
    fleet.pass_time(30)
    for _ in range(4 * 5):  # seconds without a request
        fleet.ahead += 1
        fleet.live.look()
    fleet.pass_time(30)
    page = open_page(served(fleet, traffic=False).url)
    lines = page.locator("#first-curve .line").evaluate_all(
        "(all) => all.map((e) => e.getAttribute('d').split('M').length - 1)"
    )
    assert lines == [2, 2]


def test_red_is_for_engines_that_were_up(served: Serve, open_page: Open) -> None:
    fleet = Fleet(decode=2)
    fleet.pass_time(5)
    lost, new = list(fleet.engines)[-2:]
    fleet.change(new, up=False, was_up=False, reason="cannot connect", failed_probes=2)
    fleet.change(lost, up=False, reason="cannot connect", failed_probes=2)
    fleet.pass_time(2)
    page = open_page(served(fleet, traffic=False).url)
    seen = {}
    for url in (lost, new):
        row = page.locator("#engine-rows tr", has_text=url.removeprefix("http://"))
        box = page.locator("#boxes .node", has_text=url.removeprefix("http://"))
        state, probes = row.locator("td").nth(2), row.locator("td").nth(12)
        seen[url] = (
            state.inner_text().rstrip("0123456789 s"),
            probes.inner_text(),
            "bad" in state.get_attribute("class") + probes.get_attribute("class"),
            box.get_attribute("class"),
        )
    assert seen == {
        lost: ("down", "2", True, "node down"),
        new: ("not up yet", "\N{EN DASH}", False, "node new"),
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_in_the_light_and_in_the_dark(
    served: Serve, open_page: Open, shots: Path, scheme: str
) -> None:
    fleet = Fleet()
    an_incident(fleet)
    url = next(iter(fleet.engines))
    fleet.change(url, draining=True)
    fleet.change(list(fleet.engines)[1], cache=CacheNow("lost"))
    at = served(fleet)
    page = open_page(at.url, color_scheme=scheme)
    page.locator("#decisions .fold").first.click()
    page.wait_for_timeout(1500)
    contrast, where = page.evaluate(LEAST_CONTRAST)
    assert contrast >= 4.5, where
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(ground.split("(")[1].split(",")[0]) < 64) == (scheme == "dark")
    page.screenshot(path=shots / f"{scheme}.png", full_page=True)


def test_with_the_keyboard_alone(served: Serve, open_page: Open) -> None:
    at = served()
    page = open_page(at.url)
    until(page, "() => document.querySelector('#fresh').textContent.startsWith('live ')")

    def focused() -> str:
        return str(
            page.evaluate("document.activeElement.id || document.activeElement.className")
            or page.evaluate("document.activeElement.tagName")
        )

    order = []
    for _ in range(7):
        page.keyboard.press("Tab")
        order.append(focused())
        style = page.evaluate(
            "() => { const s = getComputedStyle(document.activeElement); "
            "return [s.outlineStyle, parseFloat(s.outlineWidth)]; }"
        )
        assert style[0] == "solid" and style[1] >= 2, order
    assert order == ["pause", "problems", "changes", "SUMMARY", "all", "fold", "fold"]
    page.keyboard.press("Enter")
    second = page.locator("#decisions .fold").nth(1)
    assert second.get_attribute("aria-expanded") == "true"
    number = second.get_attribute("aria-label")
    page.wait_for_timeout(2500)  # other requests come, and the reader's row stays, with its focus
    assert second.get_attribute("aria-label") == number
    assert focused() == "fold"
    assert text(page, "#held") == "Held still while you read."
    page.keyboard.press("Enter")
    assert text(page, "#held") == ""
    for _ in range(6):
        page.keyboard.press("Shift+Tab")
    assert focused() == "pause"
    page.keyboard.press("Space")
    assert text(page, "#fresh") == "paused"
    shown = text(page, "#decisions")
    page.wait_for_timeout(2500)
    assert text(page, "#decisions") == shown
    page.keyboard.press("Space")
    until(page, "() => document.querySelector('#fresh').textContent.startsWith('live ')")
    until(page, "(old) => document.querySelector('#decisions').innerText !== old", shown)


def test_decisions_hold_still_while_they_are_read(served: Serve, open_page: Open) -> None:
    at = served()
    page = open_page(at.url)
    page.locator("#decisions .fold").nth(3).click()
    before = page.locator("#decisions .fold").first.get_attribute("aria-label")
    until(page, "() => /^Show \\d+ newer$/.test(document.querySelector('#newest').textContent)")
    assert page.locator("#decisions .fold").first.get_attribute("aria-label") == before
    detail = page.locator("#decisions .more").nth(3)
    assert detail.locator("tbody tr").count() >= 3  # the alternatives
    assert detail.locator("tr.chosen").count() == 1
    assert "expected" in detail.inner_text()
    bars = detail.locator("tbody tr .stack")
    widest = max(bars.nth(i).bounding_box()["width"] for i in range(bars.count()))
    parts = bars.last.locator("span")
    total = sum((parts.nth(i).bounding_box() or {"width": 0})["width"] for i in range(5))
    assert total == pytest.approx(widest, rel=0.05)  # the dearest fills its place
    page.locator("#newest").click()
    until(
        page,
        "(old) => document.querySelector('#decisions .fold').getAttribute('aria-label') !== old",
        before,
    )
    assert page.locator("#decisions .more:visible").count() == 0


def test_screen_readers_hear_of_changes_only(served: Serve, open_page: Open) -> None:
    at = served()
    page = open_page(at.url)
    page.evaluate(
        "() => { window.heard = []; new MutationObserver(() => "
        "window.heard.push(document.querySelector('#said').textContent))"
        ".observe(document.querySelector('#said'), { childList: true, characterData: true, "
        "subtree: true }); }"
    )
    page.wait_for_timeout(3500)
    assert page.evaluate("window.heard") == []
    url = next(iter(at.fleet.engines))
    at.do(lambda: at.fleet.change(url, up=False, reason="cannot connect"))
    until(page, "() => window.heard.length")
    page.wait_for_timeout(2500)  # ages change each second, and are not read out
    assert len(page.evaluate("window.heard")) == 1
    assert page.evaluate("window.heard")[0].startswith("Degraded. 10.0.0.11:8100: Down: cannot")
    at.do(lambda: at.fleet.end("engine_error"))
    until(page, "() => window.heard.length === 2")
    for count in ("2", "3"):  # the same problem, with other numbers
        at.do(lambda: at.fleet.end("engine_error"))
        until(
            page, "(n) => document.querySelector('#problems').innerText.includes(n + ' of ')", count
        )
    assert len(page.evaluate("window.heard")) == 2
    table = page.get_by_role("table", name="Engines")
    assert table.get_by_role("columnheader").count() == 13
    assert table.get_by_role("rowheader").count() == 5
    assert page.get_by_role("region", name="Flows").get_by_role("img").count() == 1


@pytest.mark.parametrize("width", [1280, 360])
def test_nothing_jumps(served: Serve, open_page: Open, width: int) -> None:
    at = served()
    page = open_page(at.url, width, 3000)  # all of it is seen
    page.evaluate(WATCH_SHIFTS)
    page.wait_for_timeout(2000)
    url = list(at.fleet.engines)[-1]
    at.do(lambda: at.fleet.change(url, up=False, reason="cannot connect: " + "long " * 30))
    page.wait_for_timeout(3000)
    at.do(lambda: at.fleet.change(url, up=True, reason=""))
    page.wait_for_timeout(2000)
    shifts = page.evaluate("window.shifts")
    assert sum(value for value, _ in shifts) < 0.02, shifts


def test_a_page_that_is_not_looked_at_gives_its_place_back(served: Serve, open_page: Open) -> None:
    at = served()
    page = open_page(at.url)
    until(page, "() => document.querySelector('#fresh').textContent.startsWith('live ')")
    assert at.viewers.taken == 1
    page.clock.install()
    page.evaluate(
        "() => { Object.defineProperty(document, 'hidden', { get: () => window.away, "
        "configurable: true }); window.away = true; "
        "document.dispatchEvent(new Event('visibilitychange')); }"
    )
    page.clock.run_for(59_000)
    assert at.viewers.taken == 1
    page.clock.run_for(2_000)
    gone = threading.Event()
    for _ in range(200):
        if at.viewers.taken == 0:
            break
        gone.wait(0.05)
    assert at.viewers.taken == 0
    page.evaluate(
        "() => { window.away = false; document.dispatchEvent(new Event('visibilitychange')); }"
    )
    for _ in range(200):
        if at.viewers.taken == 1:
            break
        gone.wait(0.05)
    assert at.viewers.taken == 1


def test_of_the_real_router(open_page: Open) -> None:
    with router_process() as router:
        url = f"http://127.0.0.1:{router.port}/"
        page = open_page(url)
        until(page, "() => document.querySelector('#fresh').textContent.startsWith('live ')")
        assert text(page, "#held") == "None yet."
        answer = httpx.post(
            url + "v1/completions",
            json={"prompt": "hello"},
            headers={"x-request-id": "a<b>c"},
            trust_env=False,
        )
        assert answer.status_code == 200
        until(page, "() => document.querySelectorAll('#decisions > tbody').length === 1")
        row = page.locator("#decisions > tbody > tr").first
        assert "a<b>c" in row.inner_text()
        assert f"{router.prefill.url} → {router.decode.url}".replace("http://", "") in (
            row.inner_text()
        )
        assert text(page, "#flow-unit") == "last minute; widths by requests"
        until(page, "() => document.querySelectorAll('#ribbons g').length === 2")
        page.close()  # before the router ends
