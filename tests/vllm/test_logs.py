"""Our log lines: in vLLM's format, once each, in every process, however an engine is started.

A server's processes are looked at in test_handover.py, whose engines run anyway.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

with warnings.catch_warnings():  # torch warns of itself
    warnings.simplefilter("ignore")
    from kvferry.vllm.plugin import log_with_vllm

from tiny_models import make_model
from vllm_engines import ENVIRONMENT
from vllm_pairs import start_lines

ROOT = Path(__file__).parents[2]


class Lines(logging.Handler):
    """Keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.got.append(record.getMessage())


class TestHandler:
    ours, vllm = logging.getLogger("kvferry"), logging.getLogger("vllm")

    @pytest.fixture(autouse=True)
    def unconfigured(self) -> Iterator[None]:
        """Loggers as they are when a process begins; as they were, afterwards."""
        loggers = (self.ours, self.vllm)
        before = [(x.handlers, x.level, x.propagate, x.parent) for x in loggers]
        for logger in loggers:
            logger.handlers, logger.propagate, logger.parent = [], True, logging.root
            logger.setLevel(logging.NOTSET)
        yield
        for logger, (handlers, level, propagate, parent) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate, logger.parent = handlers, propagate, parent
            logger.setLevel(level)

    @pytest.fixture
    def root(self) -> Iterator[Lines]:
        """A handler that the application gave the root logger."""
        lines = Lines()
        logging.root.addHandler(lines)
        yield lines
        logging.root.removeHandler(lines)

    def configured(self, level: int) -> Lines:
        """What vLLM does to its logger."""
        lines = Lines()
        self.vllm.handlers, self.vllm.propagate = [lines], False
        self.vllm.setLevel(level)
        return lines

    def test_vllm_configures_its_logger_later_and_again(self, root: Lines) -> None:
        log_with_vllm()
        first = self.configured(logging.INFO)
        logging.getLogger("kvferry.a.module").info("one")
        self.ours.debug("not at this level")
        second = self.configured(logging.DEBUG)
        self.ours.debug("two")
        assert (first.got, second.got, root.got) == (["one"], ["two"], [])

    def test_an_application_that_configures_logging_itself(self, root: Lines) -> None:
        """VLLM_CONFIGURE_LOGGING=0: vLLM's logger has no handler, and passes all to the root's."""
        log_with_vllm()
        self.ours.warning("one")
        assert root.got == ["one"]

    def test_a_handler_of_the_applications_for_us(self, root: Lines) -> None:
        own = Lines()
        self.ours.handlers, self.ours.propagate = [own], False
        log_with_vllm()
        theirs = self.configured(logging.INFO)
        self.ours.warning("one")
        assert (own.got, theirs.got, root.got) == (["one"], [], [])

    def test_more_than_once(self) -> None:
        log_with_vllm()
        log_with_vllm()
        lines = self.configured(logging.INFO)
        self.ours.warning("one")
        assert lines.got == ["one"] and self.ours.handlers == []


# The plugin is loaded as an installed package's would be: by its entry point, before `EngineArgs`
# have set up logging. The CPU build wants `spawn`; other platforms fork an engine's core.
CODE = """
import os, sys
from vllm import LLM, EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

how, model = sys.argv[1:]
transfer = {"kv_connector": "FerryConnector", "kv_role": "kv_both", "engine_id": how}
options = dict(model=model, dtype="float32", max_model_len=256, enforce_eager=True,
               skip_tokenizer_init=True, kv_transfer_config=transfer)
if how == "forked":
    config = EngineArgs(**options).create_engine_config()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    engine = LLMEngine.from_vllm_config(config)
    engine.engine_core.shutdown()
else:
    LLM(**options)
print("pid", os.getpid())
"""


@pytest.mark.parametrize("how", ["in process", "forked"])
def test_engines(how: str, tmp_path: Path) -> None:
    entry = tmp_path / "kvferry_plugin_test-0.dist-info"
    entry.mkdir()
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: kvferry-plugin-test\n")
    (entry / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nkvferry = kvferry.vllm.plugin:register\n"
    )
    model = make_model(tmp_path / "tiny")
    run = subprocess.run(
        [sys.executable, "-c", CODE, how, str(model)],
        env={
            **os.environ,
            **ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(how == "forked")),
            "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    lines = start_lines(run.stdout)
    assert sorted(line.what for line in lines) == ["engine", "rank"], run.stdout[-4000:]
    calling = int(run.stdout.rpartition("pid ")[2])
    assert {line.pid == calling for line in lines} == {how == "in process"}
