"""A plugin for pytest: vLLM's tests get our connector, where they would get vLLM's.

`KVFERRY_CLASS` names the class. Each test runs once for each role. vLLM's helpers make a
configuration from two classes, which the plugin replaces: the transfer configuration then names our
connector, and the model is a folder with a configuration instead of a name on a hub. Where a helper
makes a request with the answer of a prefill engine, the request gets the answer that an engine with
our connector gives: a ticket. A scheduler has no workers here, so it is told what they would say.

A test that makes none of our connectors proves nothing, and counts as failed. What became of each
test goes to the file that `KVFERRY_OUTCOMES` names.

The tests are those of the source tree that `VLLM_SRC` names; vLLM is the installed one. So it is
imported, and finds its platform, before the tree is on the path. The tree has a vLLM of its own,
and PyPI's sdist says in its metadata that it is not a CPU build.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from vllm.platforms import current_platform

from tiny_models import llama_config

assert current_platform.device_type  # and not "", as where vLLM found none
sys.path.append(os.environ["VLLM_SRC"])
CLASS = os.environ["KVFERRY_CLASS"]
OUTCOMES = Path(os.environ["KVFERRY_OUTCOMES"])
ROLES = ("kv_both", "kv_producer", "kv_consumer")
UNIT = "tests.v1.kv_connector.unit"
TEST_SECONDS = 20  # a test takes a fraction of a second
outcomes: dict[str, dict[str, str]] = {}


def pytest_configure() -> None:
    """Before test files take the helper's name into their own."""
    faulthandler.enable()
    helpers = importlib.import_module(f"{UNIT}.utils")
    make = helpers.create_request

    def create_request(*args: Any, **kwargs: Any) -> Any:
        request = make(*args, **kwargs)
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            params |= ticket(request).to_params()
        return request

    helpers.create_request = create_request


def ticket(request: Any) -> Any:
    from kvferry.handover.ticket import Ticket
    from kvferry.vllm.fingerprint import request_digest

    params = request.kv_transfer_params
    return Ticket(
        engine_id=params["remote_engine_id"],
        incarnation="its first life",
        hold_id=params["remote_request_id"],
        digest=request_digest(request),
        tokens=request.num_prompt_tokens,
        host=params["remote_host"],
        port=params["remote_port"],
        request_id=params["remote_request_id"],
    )


@pytest.fixture(autouse=True, params=ROLES, ids=[f"role={role}" for role in ROLES])
def our_role(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    """Our class for the length of one test; its connectors are closed afterwards."""
    import kvferry.vllm

    ours: Any = getattr(kvferry.vllm, CLASS)
    helpers = importlib.import_module(f"{UNIT}.utils")
    theirs, models = helpers.KVTransferConfig, helpers.ModelConfig
    (tmp_path / "config.json").write_text(json.dumps(llama_config(dtype="float16")))
    made: list[Any] = []

    def transfer(**fields: Any) -> Any:
        named = {"kv_connector": CLASS, "kv_connector_module_path": "kvferry.vllm"}
        return theirs(**{**fields, **named, "kv_role": request.param})

    def model(**fields: Any) -> Any:
        return models(**{**fields, "model": str(tmp_path), "skip_tokenizer_init": True})

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        made.append(self)
        if self.handover is not None:
            self.handover.producing.flat = True  # workers that are no child of a MultiConnector

    # The tests choose a policy by hand. A connector sees that on the command line alone.
    monkeypatch.setattr(sys, "argv", [*sys.argv, "kv_load_failure_policy"])
    begin = ours.__init__
    monkeypatch.setattr(ours, "__init__", note)
    monkeypatch.setattr(helpers, "KVTransferConfig", transfer)
    monkeypatch.setattr(helpers, "ModelConfig", model)
    yield
    for one in made:
        one.shutdown()
    assert made, f"the test made no {CLASS}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    def late(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"a test took more than {TEST_SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(TEST_SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.removeprefix(UNIT.replace(".", "/") + "/").partition("[")[0]
    (role,) = [role for role in ROLES if f"role={role}" in report.nodeid]
    found = outcomes.setdefault(name, {})
    before = found.get(role, "passed")
    if report.outcome != "passed" and before == "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        found[role] = f"{report.outcome}: {crash.message if crash else report.longreprtext}"[:400]
    else:
        found[role] = before


def pytest_sessionfinish() -> None:
    OUTCOMES.write_text(json.dumps(outcomes, indent=1, sort_keys=True))
