"""Chromium, driven by Playwright. Without either, these tests are skipped and say why."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from live_fleet import Fleet, Served

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs the extra 'browser': pip install '.[browser]'"
    )
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium, or name it in CHROMIUM")
    with playwright.sync_playwright() as run:
        chromium = run.chromium.launch(executable_path=found, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def served() -> Iterator[Callable[..., Served]]:
    """Serves a fleet; all of them are stopped at the end."""
    running: list[Served] = []

    def serve(fleet: Fleet | None = None, **more: Any) -> Served:
        if fleet is None:
            fleet = Fleet()
            fleet.pass_time(90)
        running.append(Served(fleet, **more))
        return running[-1]

    yield serve
    for one in running:
        one.stop()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page in a context of its own. Whatever the page complains about fails the test."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def open_(
        url: str, width: int = 1280, height: int = 900, expect: str = "", **options: Any
    ) -> Any:
        """`expect`: complaints with these words are no failure."""
        viewport = {"width": width, "height": height}
        context = browser.new_context(viewport=viewport, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)

        def complain(text: str) -> None:
            if not (expect and expect in text):
                complaints.append(text)

        page.on("console", lambda m: m.type in ("error", "warning") and complain(m.text))
        page.on("pageerror", lambda error: complain(str(error)))
        page.on("dialog", lambda dialog: (complain(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda r: r.url.startswith(url) or complain(f"asked for {r.url}"))
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not complaints


@pytest.fixture
def shots() -> Path:
    """Where pictures for people go."""
    folder = Path(__file__).parents[2] / "out" / "browser"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
