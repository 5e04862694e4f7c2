"""The plan's HTML page: well formed, complete in itself, and safe with any name in it."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

from kvferry.cli.plan import PLACEHOLDER, plan_page
from kvferry.layout.hf import load_model
from kvferry.layout.shape import EngineShape
from kvferry.plan.report import PlanReport, report

VOID = {"meta", "link", "br", "input", "img", "hr"}
HOSTILE = "</script><script>alert(1)</script><!-- & \u2028\u2029 \"' " + PLACEHOLDER
LINK_BYTES_PER_S = 50e9


class Page(HTMLParser):
    """Elements, their attributes, the text of every script; refuses tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data

    @property
    def data(self) -> dict[str, object]:
        loaded = json.loads(self.scripts[0])
        assert isinstance(loaded, dict)
        return loaded


def make(model: str, src: str, dst: str) -> PlanReport:
    return report(load_model(model), EngineShape.parse(src), EngineShape.parse(dst), 1024)


def plain(value: object) -> object:
    """As JSON gives it back: tuples become lists."""
    return json.loads(json.dumps(value))


@pytest.mark.parametrize(
    ("model", "src", "dst"),
    [
        ("llama-3.1-70b", "tp=4,pp=2,block=16,order=LBNHC", "tp=8,block=32"),
        ("deepseek-v3", "tp=8", "tp=4,pp=2"),
        ("granite-4.0-h-small", "tp=4", "tp=8"),
        ("llama-3.1-8b", "tp=1", "tp=1"),
        ("llama-3.1-70b", "tp=8,pp=30+50", "tp=16"),
    ],
)
@pytest.mark.parametrize("link", [None, LINK_BYTES_PER_S])
def test_page_is_well_formed_and_holds_the_whole_report(
    model: str, src: str, dst: str, link: float | None
) -> None:
    plan = make(model, src, dst)
    page = Page(plan_page(plan, link))
    assert page.open == []
    assert len(page.scripts) == 2
    assert len(page.ids) == len(set(page.ids))
    data = page.data
    ranks = data.pop("ranks")
    assert data == plain(plan.to_dict(link))
    assert ("predicted_seconds" in data) == (link is not None)
    assert ranks == {
        "src": [list(rank) for rank in EngineShape.parse(src).ranks],
        "dst": [list(rank) for rank in EngineShape.parse(dst).ranks],
    }


def test_every_element_the_script_asks_for_exists() -> None:
    page = Page(plan_page(make("llama-3.1-8b", "tp=2", "tp=1"), None))
    wanted = set(re.findall(r'(?:\$|getElementById)\("([a-z]+)"\)', page.scripts[1]))
    assert wanted
    assert wanted <= set(page.ids)


def test_page_asks_for_nothing_outside_itself() -> None:
    text = plan_page(make("granite-4.0-h-small", "tp=4", "tp=8"), LINK_BYTES_PER_S)
    assert set(re.findall(r"https?://[^\s\"'<>]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|\bimport\b", text)
    for tag, name, value in Page(text).attributes:
        assert name != "src", tag
        assert name != "href" or value == "data:,"


def test_hostile_name_stays_data() -> None:
    plan = dataclasses.replace(make("llama-3.1-8b", "tp=2", "tp=1"), model=HOSTILE)
    text = plan_page(plan, None)
    page = Page(text)
    assert len(page.scripts) == 2
    assert page.data["model"] == HOSTILE
    assert "alert(1)</script>" not in text
    assert not set("<>&\u2028\u2029") & set(page.scripts[0])


def test_script_never_turns_data_into_markup() -> None:
    script = Page(plan_page(make("llama-3.1-8b", "tp=1", "tp=1"), None)).scripts[1]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", script)


def test_plan_without_edges_still_makes_a_page() -> None:
    plan = dataclasses.replace(
        make("llama-3.1-8b", "tp=1", "tp=1"),
        edges=(),
        total_bytes=0,
        busiest_source_bytes=0,
        busiest_destination_bytes=0,
    )
    assert Page(plan_page(plan, LINK_BYTES_PER_S)).data["edges"] == []
