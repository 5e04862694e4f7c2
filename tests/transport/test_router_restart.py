"""Routers in processes of their own, one in place of another: no stream and no connection lost."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from router_process import HELD_EVENTS, RouterProcess, refuses, router_process
from waiting import wait_until

LIMITS = {"drain_seconds": 60.0, "probe_every_seconds": 0.1}


@pytest.fixture(autouse=True)
def _own_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_RUNTIME_DIR", str(tmp_path / "run"))


def url(router: RouterProcess) -> str:
    return f"http://127.0.0.1:{router.port}/v1/completions"


class Crowd:
    """Clients that ask without a pause, some on new connections and some on kept ones."""

    def __init__(self, address: str) -> None:
        self.answers = 0
        self.failures: list[str] = []
        self._address = address
        self.stop_asking = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(kept,)) for kept in (False, False, True, True)
        ]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self.answers > 20)
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop_asking.set()
        for thread in self._threads:
            thread.join(30)

    def _ask(self, kept: bool) -> None:
        keepalive = httpx.Limits(max_keepalive_connections=1 if kept else 0)
        with httpx.Client(trust_env=False, timeout=20, limits=keepalive) as client:
            while not self.stop_asking.is_set():
                try:
                    answer = client.post(self._address, json={"prompt": "x"})
                    assert answer.status_code == 200, answer.text
                    self.answers += 1
                except (httpx.HTTPError, AssertionError) as error:
                    self.failures.append(f"{kept=}: {error!r}")
                time.sleep(0.005)


def test_a_restart_loses_no_stream_and_no_connection() -> None:
    with router_process(LIMITS) as old, ThreadPoolExecutor(20) as pool:
        begun = threading.Semaphore(0)

        def stream(_: int) -> bytes:
            body = {"prompt": "held", "stream": True}
            with httpx.stream("POST", url(old), json=body, trust_env=False, timeout=300) as got:
                assert got.status_code == 200
                chunks = got.iter_bytes()
                data = next(chunks)
                begun.release()
                return data + b"".join(chunks)

        streams = [pool.submit(stream, n) for n in range(20)]
        for _ in streams:
            assert begun.acquire(timeout=30)
        with Crowd(url(old)) as crowd:
            new = RouterProcess(
                [old.prefill, old.decode], LIMITS, None, more=["--take-over"], port=old.port
            )
            try:
                wait_until(lambda: any("this one drains" in line for line in old.log))
                before = crowd.answers
                wait_until(lambda: crowd.answers > before + 200)
                assert old.process.poll() is None  # it has its streams
                assert not any(s.done() for s in streams)
                old.decode.go_on.set()
                assert [s.result() for s in streams] == [b"".join(HELD_EVENTS)] * 20
                assert old.process.wait(20) == 0
                before = crowd.answers
                wait_until(lambda: crowd.answers > before + 20)
                assert crowd.failures == []
                assert any("taking over from the router" in line for line in new.log)

                # And once more: the new one can be replaced like the first.
                third = RouterProcess(
                    [old.prefill, old.decode],
                    LIMITS,
                    None,
                    more=["--take-over"],
                    port=old.port,
                    forked=True,
                )
                try:
                    assert new.process.wait(20) == 0
                    before = crowd.answers
                    wait_until(lambda: crowd.answers > before + 20)
                    assert crowd.failures == []
                finally:
                    third.stop()
                    crowd.stop_asking.set()
            finally:
                new.stop()


def test_a_new_router_that_fails_leaves_the_old_one_alone(tmp_path: Path) -> None:
    with router_process(LIMITS) as old:
        door = tmp_path / "run" / f"router-127.0.0.1-{old.port}"
        assert door.is_socket() and door.parent.stat().st_mode & 0o077 == 0
        for last_word in (b"", b"never"):
            with closing(socket.socket(socket.AF_UNIX)) as taker:
                taker.settimeout(20)
                taker.connect(str(door))
                said, numbers, _, _ = socket.recv_fds(taker, 64, 4)
                with closing(socket.socket(fileno=numbers[0])) as shared:
                    assert said == b"kvferry router 1"
                    assert shared.getsockname() == ("127.0.0.1", old.port)
                taker.sendall(last_word)
        for _ in range(3):
            assert httpx.post(url(old), json={"prompt": "x"}, trust_env=False).is_success
        assert old.process.poll() is None
        # Without --take-over, a port that is taken is an error.
        with pytest.raises(
            AssertionError, match="in use; choose another --port, or --take-over if"
        ):
            RouterProcess([old.prefill, old.decode], LIMITS, None, port=old.port)
        old.process.send_signal(signal.SIGTERM)
        assert old.process.wait(20) == -signal.SIGTERM  # drained
        assert not door.exists()


def test_a_new_router_that_is_told_to_stop_while_it_starts_leaves_the_old_one_alone() -> None:
    with router_process(LIMITS) as old, closing(socket.create_server(("127.0.0.1", 0))) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "kvferry", "router", "--port", str(old.port)]
        command += ["--take-over", "--decode", address, "--limit", "probe_seconds=5"]
        new = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            silent.settimeout(60)
            with silent.accept()[0]:  # its first probe, which is not answered
                new.send_signal(signal.SIGTERM)
            new.wait(30)
        finally:
            new.kill()
            new.wait()
        assert httpx.post(url(old), json={"prompt": "x"}, trust_env=False).is_success
        assert old.process.poll() is None
        assert not any("this one drains" in line for line in old.log)


def test_with_nobody_to_take_over_from_a_router_starts_by_itself(tmp_path: Path) -> None:
    with router_process(LIMITS) as old:
        old.process.kill()
        old.process.wait()
        door = tmp_path / "run" / f"router-127.0.0.1-{old.port}"
        assert door.is_socket()  # of a router that was killed
        new = RouterProcess(
            [old.prefill, old.decode], LIMITS, None, more=["--take-over"], port=old.port
        )
        try:
            assert any("no router to take over from" in line for line in new.log)
            other = RouterProcess([old.prefill, old.decode], LIMITS, None, forked=True)
            other.stop()
            assert not any("came to nothing" in line for line in new.log)
            assert httpx.post(url(old), json={"prompt": "x"}, trust_env=False).is_success
            assert door.is_socket()
        finally:
            new.stop()


def test_an_idle_connection_is_answered_while_the_router_drains() -> None:
    with router_process(LIMITS) as router, httpx.Client(trust_env=False, timeout=20) as client:
        assert client.post(url(router), json={"prompt": "x"}).is_success
        router.process.send_signal(signal.SIGTERM)
        wait_until(lambda: refuses(router.port))
        last = client.post(url(router), json={"prompt": "x"})
        assert last.is_success and last.headers["connection"] == "close"
        assert router.process.wait(20) == -signal.SIGTERM  # drained
