"""The documents: links lead somewhere, tables say what the code says, quoted messages exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

from kvferry.cli.main import app
from kvferry.net.messages import VERSION
from kvferry.pool.orders import METRICS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^()\s]+)\)")
SPANS = ("hold", "load")  # of traces: `kvferry hold`
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


@cache
def anchors(page: Path) -> set[str]:
    """What GitHub and the site make of headings, where both make the same."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {"-".join(title.split(" ")) for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_anchors_exist(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target == page or target.is_relative_to(ROOT), link
        if page.parent == ROOT / "docs":  # the site has nothing outside of it
            assert target.parent == page.parent, link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    inline = re.findall(r"`([^`\n]+)`", prose(page))
    code = "\n".join([*FENCE.findall(page.read_text()), *inline])
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make ([a-z-]+)", code, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    known = {*get_command(app).commands, *SPANS}  # type: ignore[attr-defined]
    assert set(re.findall(r"^kvferry ([a-z]+)", code, re.MULTILINE)) <= known
    for module in set(re.findall(r"python -m benchmarks\.(\w+)", code)):
        assert list((ROOT / "benchmarks").glob(f"{module}*")), module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sequence_diagrams_have_no_semicolon(page: Path) -> None:
    """It ends a statement there, and the diagram is not drawn."""
    for diagram in re.findall(
        r"^```mermaid\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
    ):
        assert not diagram.startswith("sequenceDiagram") or ";" not in diagram


def test_documents_that_the_code_names_exist() -> None:
    for folder in ("src", "scripts", "benchmarks", "dashboards"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".json", ".html"):
                for name in re.findall(r"\bdocs/\w+\.md\b", file.read_text()):
                    assert (ROOT / name).is_file(), f"{file}: {name}"


def test_named_tests_exist() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    for name in set(re.findall(r"`(tests/[\w/]+\.py)`", page)):
        assert (ROOT / name).is_file(), name
    code = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    for name in set(re.findall(r"`(test_\w+|Test\w+)`", page)):
        assert re.search(rf"^ *(def|class) {name}\b", code, re.MULTILINE), name


def test_every_page_is_in_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r"^ +- .*?(\w+\.md)$", site, re.MULTILINE))
    assert named == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_tables_are_what_the_code_says() -> None:
    """After a change: python scripts/configuration_reference.py"""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "configuration_reference.py", "--check"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_pages_say_the_same_of_keys_of_vllms_connectors() -> None:
    def rows(page: str, name: str) -> list[list[str]]:
        text = (ROOT / "docs" / page).read_text().split(f"<!-- {name}: begin -->")[1]
        lines = text.split(f"<!-- {name}: end -->")[0].strip().splitlines()[2:]
        return [line.strip("| ").split(" | ") for line in lines]

    sentences = {key: words for _, key, words in rows("configuration.md", "their-keys")}
    begins = {"translated": "Taken for", "no effect": "No effect", "refused": "Refused"}
    compared = 0
    for _, kind, key, here, *_ in rows("compatibility.md", "drop-in"):
        if kind == "key" and here != "same":
            assert sentences[key].startswith(begins[here]), key
            compared += 1
    assert compared > 20


def test_every_metric_of_the_pool_is_explained() -> None:
    page = (ROOT / "docs" / "operating.md").read_text()
    section = page.split("### Pool", 1)[1].split("\n#", 1)[0]
    ours = {f"vllm:kvferry_pool_{name}_total" for name in METRICS}
    assert set(re.findall(r"`(vllm:kvferry_pool_\w+)", section)) == ours
    for metric in METRICS.values():
        assert all(f"`{outcome}`" in section for outcome in metric.events.values() if outcome)


def test_quoted_messages_are_the_codes_own() -> None:
    """An operator searches the page for what the log says."""
    page = (ROOT / "docs" / "operating.md").read_text()
    sections = [part.split("\n#", 1)[0] for part in page.split("### ")]
    (starts,) = [part for part in sections if part.startswith("The engine does not start")]
    (messages,) = [part for part in sections if part.startswith("By message")]
    rows = [line.split("|")[1] for line in (starts + messages).splitlines() if line[:3] == "| `"]
    quoted = [text.split(" (")[0] for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 20
    said = "\n".join(_texts())
    assert [text for text in quoted if text not in said] == []


def test_the_protocol_page_is_of_this_version() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    assert f"version {VERSION}." in page and f"Version {VERSION} " in page


def test_files_and_methods_that_the_design_names_exist() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    for name in set(re.findall(r"`([\w/]+\.py)`", page)):
        found = [base for base in (ROOT, ROOT / "src" / "kvferry") if (base / name).is_file()]
        assert found, name
    code = "\n".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    classes = set(re.findall(r"^class (\w+)", code, re.MULTILINE))
    methods = set(re.findall(r"^    def (\w+)", code, re.MULTILINE))
    for kind, method in set(re.findall(r"`([A-Z]\w+)\.(\w+)`", page)):
        assert kind in classes and method in methods, f"{kind}.{method}"


def _texts() -> list[str]:
    """Every text in the code, with {} where something is put in."""
    found = []
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
                found.append("".join(map(str, parts)))
    return found
