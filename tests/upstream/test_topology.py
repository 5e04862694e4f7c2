"""vLLM's own tests of TransferTopology and of its tp mapping, run against our class.

They are read from a checkout of vLLM, whose path is in VLLM_SRC; without it there is nothing to
run. `verdicts.toml` names the tests that run here under `topology`, and says of the others why they
do not.
"""

from __future__ import annotations

import ast
import os
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry import CacheModel, Component, EngineShape, Group, Rank
from kvferry.topology import EngineTransferInfo, TransferTopology

UNIT = Path(os.environ.get("VLLM_SRC", ""), "tests/v1/kv_connector/unit")
needs_checkout = pytest.mark.skipif(
    not os.environ.get("VLLM_SRC"), reason="VLLM_SRC names no checkout of vLLM"
)

VERDICTS = tomllib.loads((Path(__file__).parent / "verdicts.toml").read_text())
PASSING = [(one["name"], test) for one in VERDICTS["file"] for test in one.get("topology", ())]


def topology(
    tp_rank: int, tp_size: int, engine_id: str, is_mla: bool, total_num_kv_heads: int, **_: object
) -> TransferTopology:
    """Our class, from the sizes that vLLM's takes."""
    units, sharding = (1, "replicated") if is_mla else (total_num_kv_heads, "split")
    component: Any = Component("kv", units, (2,), 1, sharding)  # type: ignore[arg-type]
    model = CacheModel("sizes", (Group("attention", (0,), (component,)),))
    return TransferTopology(engine_id, model, EngineShape(tp=tp_size), Rank(0, tp_rank))


def mapping(
    tp_rank: int = 0,
    tp_size: int = 1,
    remote_tp_size: int = 1,
    is_mla: bool = False,
    num_kv_heads: int = 8,
    **_: object,
) -> SimpleNamespace:
    """Our source ranks, as the result of vLLM's mapping."""
    ours = topology(tp_rank, tp_size, "local", is_mla, num_kv_heads)
    ours.register_remote_engine("remote", EngineTransferInfo(remote_tp_size, 1024, 16, 1))
    return SimpleNamespace(all_source_ranks=tuple(ours.source_ranks("remote")))


def functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """The functions of a file, each with whether it is a method."""
    for node in tree.body:
        for one in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(one, ast.FunctionDef):
                yield one, node is not one


def upstream(file: str, name: str) -> Callable[[], None]:
    """One test of the checkout, with our names in place of vLLM's."""
    tree = ast.parse((UNIT / file).read_text())
    plain = [one for one, method in functions(tree) if not method and one.name.startswith("_")]
    ((test, method),) = [(one, m) for one, m in functions(tree) if one.name == name]
    ours = {"TransferTopology": topology, "EngineTransferInfo": EngineTransferInfo}
    around: dict[str, Any] = {"pytest": pytest, "_FakeAttentionBackend": object, **ours}
    wanted = [one for one in plain if one.name == "_make_topology"] + [test]
    future = ast.parse("from __future__ import annotations").body
    for one in wanted:
        one.decorator_list = []
    exec(compile(ast.Module([*future, *wanted], []), str(UNIT / file), "exec"), around)
    around["_compute_mapping"] = mapping
    made = around[name]
    return (lambda: made(None)) if method else made


@needs_checkout
@pytest.mark.parametrize(("file", "name"), PASSING)
def test_passes(file: str, name: str) -> None:
    pytest.importorskip("vllm")
    upstream(file, name)()
