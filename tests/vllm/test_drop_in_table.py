"""The table in docs/compatibility.md of what becomes of the interfaces of vLLM's own connectors,
against the vLLM installed.

vLLM's sources are read, not run: each key, field, variable, request parameter, response field and
metric in the code of its connectors must be in the table, and no other.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

spec = importlib.util.find_spec("vllm")
if spec is None or spec.origin is None:
    pytest.skip("this tier runs in the environment with vLLM", allow_module_level=True)

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
CONNECTORS = {
    "nixl": "`NixlConnector`, pull and push",
    "mooncake": "`MooncakeConnector`",
    "store": "`MooncakeStoreConnector`",
}
KINDS = ("key", "field", "variable", "request parameter", "response field", "metric")
# Keys of the pool that vLLM had once; they are accepted, and are not in the table.
FORMER_KEYS = {"consumer_is_to_put", "discard_partial_chunks", "prefer_alloc_in_same_node"}
V1 = Path(spec.origin).parent / "distributed" / "kv_transfer" / "kv_connector" / "v1"
# `rdma_utils` serves the store alone.
SOURCES = {
    "nixl": sorted((V1 / "nixl").glob("*.py")),
    "mooncake": sorted(p for p in (V1 / "mooncake").glob("*.py") if p.stem != "rdma_utils"),
    "store": [V1 / "mooncake" / "rdma_utils.py", *sorted((V1 / "mooncake" / "store").glob("*.py"))],
}
CONFIGURATIONS = ("kv_transfer_config", "kv_config")
PARAMETERS = ("params", "kv_transfer_params")


def table() -> list[list[str]]:
    """Its rows: of which connector, what kind, its name, what becomes of it, and why."""
    text = PAGE.read_text().split("<!-- drop-in: begin -->")[1].split("<!-- drop-in: end -->")[0]
    lines = text.strip().splitlines()[2:]
    return [[c.strip(" `") for c in line[1:-1].split("|")] for line in lines]


def named(node: ast.AST) -> str:
    """The last part of `a.b.c`, or ""."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def text(node: ast.AST | None) -> str | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) else None


def read(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What a module of vLLM uses, each as its kind and its name."""
    for node in ast.walk(tree):
        on: str | None = None
        word: str | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            on, word = named(node.func.value), text(node.args[0])
            if word and node.func.attr == "get_from_extra_config":
                yield "key", word
            if word and node.func.attr == "getenv":
                yield "variable", word
            if node.func.attr not in ("get", "pop", "setdefault"):
                continue
        elif isinstance(node, ast.Subscript):
            on, word = named(node.value), text(node.slice)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            on, word = named(node.comparators[0]), text(node.left)
        elif isinstance(node, ast.Attribute) and named(node.value) == "envs":
            yield "variable", node.attr
        elif isinstance(node, ast.Attribute) and named(node.value) in CONFIGURATIONS:
            if node.attr != "get_from_extra_config":
                yield "field", node.attr
        elif (metric := text(node)) and metric.startswith("vllm:"):
            yield "metric", metric
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("request_finished"):
            yield from (("response field", name) for name in answered(node))
        if on and word:
            if on.endswith("extra_config"):
                yield "key", word
            elif on in PARAMETERS:
                yield "request parameter", word
            elif on == "environ":
                yield "variable", word


def answered(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and named(node.func) == "dict":
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)
        elif isinstance(node, ast.Dict):
            yield from (word for key in node.keys if (word := text(key)))


@pytest.mark.parametrize("connector", list(SOURCES))
def test_the_table_has_what_vllm_has(connector: str) -> None:
    theirs: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for path in SOURCES[connector]:
        for kind, name in read(ast.parse(path.read_text())):
            theirs[kind].add(name)
    mine = [row for row in table() if row[0] == CONNECTORS[connector].strip("`")]
    ours = {kind: {row[2] for row in mine if row[1] == kind} for kind in KINDS}
    assert theirs["key"] and theirs["variable"] and theirs["field"]
    missing = {kind: theirs[kind] - ours[kind] for kind in theirs if theirs[kind] - ours[kind]}
    gone = {kind: ours[kind] - theirs[kind] for kind in ours if ours[kind] - theirs[kind]}
    assert not missing, f"of {connector}, and not in docs/compatibility.md"
    assert not gone, f"in docs/compatibility.md, and not of vLLM's {connector} any more"
    assert not theirs["key"] & FORMER_KEYS


def test_what_has_no_effect_or_is_refused_has_a_reason() -> None:
    for _, _, name, became, why in table():
        assert became in ("same", "translated", "no effect", "refused"), name
        assert why or became == "same", name


def test_a_new_key_of_vllm_is_noticed() -> None:
    """The reader sees each of the ways in which vLLM's connectors name things."""
    source = """
def request_finished(self, request):
    params = request.kv_transfer_params
    if params.get("asked") or params["too"] or "third" in self.kv_transfer_params:
        return True, dict(answer=1)
    config.get_from_extra_config("one", 2), config.kv_connector_extra_config.get("two")
    extra_config["three"], "four" in extra_config, envs.FIVE, os.environ["SIX"], os.getenv("SEVEN")
    return self.kv_transfer_config.eight, "vllm:nine"
"""
    assert set(read(ast.parse(source))) == {
        *(("request parameter", name) for name in ("asked", "too", "third")),
        *(("key", name) for name in ("one", "two", "three", "four")),
        *(("variable", name) for name in ("FIVE", "SIX", "SEVEN")),
        ("response field", "answer"),
        ("field", "eight"),
        ("metric", "vllm:nine"),
    }
