"""HTTPS to clients and to engines, with certificates that the test makes."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import ssl
import subprocess
import time
import warnings
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from uvicorn.server import ServerState

from kvferry.router.api import Limits
from kvferry.router.app import connections_of
from router_process import HELD_EVENTS, RouterProcess, refuses, router_process
from waiting import wait_until

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys")


@dataclass(frozen=True)
class Identity:
    cert: Path
    key: Path

    def trusted(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.cert)

    def server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        return context


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    folder = tmp_path_factory.mktemp("tls")
    made = Identity(folder / "cert.pem", folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=router", "-addext"]
    command += ["subjectAltName=IP:127.0.0.1", "-keyout", str(made.key), "-out", str(made.cert)]
    subprocess.run(command, check=True, capture_output=True)
    return made


def arguments(identity: Identity) -> list[str]:
    return ["--tls-cert", str(identity.cert), "--tls-key", str(identity.key)]


def address(router: RouterProcess, path: str = "/v1/completions") -> str:
    return f"https://127.0.0.1:{router.port}{path}"


def test_clients_by_https(identity: Identity) -> None:
    with router_process(more=arguments(identity)) as router:
        router.decode.chunks_of_stream = 3
        with httpx.Client(verify=identity.trusted(), trust_env=False, timeout=30) as client:
            for _ in range(3):  # on one connection
                assert client.post(address(router), json={"prompt": "x"}).status_code == 200
            got = client.post(address(router), json={"prompt": "large"})
            assert len(got.content) == 8 << 20
            got = client.post(address(router), json={"prompt": "x", "stream": True})
            assert len(got.content) == 3 * 4096 * 9
            big = "x" * (4 << 20)
            assert client.post(address(router), json={"prompt": big}).status_code == 200
        with pytest.raises(httpx.ConnectError, match="self-signed"):
            httpx.get(address(router, "/health"), trust_env=False)
        with pytest.raises(httpx.HTTPError):  # not HTTPS
            httpx.get(f"http://127.0.0.1:{router.port}/health", trust_env=False)
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        with warnings.catch_warnings(action="ignore"):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, OSError)), router.connect() as sock:
            old.wrap_socket(sock)
        assert not any("Traceback" in line for line in router.log), "".join(router.log)


def test_connections_that_never_shake_hands(identity: Identity) -> None:
    """More than the router has descriptors for: each has a deadline, none keeps a client out."""
    limits = {"header_seconds": 2}
    with (
        router_process(limits, files=256, more=arguments(identity)) as router,
        ExitStack() as stack,
    ):
        silent = [stack.enter_context(router.connect()) for _ in range(256)]
        for sock in silent[::2]:
            with suppress(OSError):
                sock.sendall(b"\x16\x03\x01")  # a part of a greeting
        client = httpx.Client(verify=identity.trusted(), trust_env=False, timeout=30)
        with client:
            assert client.post(address(router), json={"prompt": "x"}).status_code == 200
        begun = time.monotonic()
        for sock in silent:
            with suppress(ConnectionError):
                while sock.recv(1 << 16):
                    pass
        assert time.monotonic() - begun < 15
        files = router.files()
        wait_until(lambda: router.files() <= files)
        assert not any("out of system resource" in line for line in router.log)
        assert not any("Traceback" in line for line in router.log), "".join(router.log)


def test_a_connection_that_opens_while_the_router_drains_gets_one_answer(
    identity: Identity,
) -> None:
    with router_process({"drain_seconds": 60.0}, more=arguments(identity)) as router:
        body = {"prompt": "held", "stream": True}
        with (
            router.connect() as late,
            httpx.Client(verify=identity.trusted(), trust_env=False, timeout=30) as client,
            client.stream("POST", address(router), json=body) as held,  # keeps the router alive
        ):
            events = held.iter_bytes()
            next(events)
            router.process.send_signal(signal.SIGTERM)
            wait_until(lambda: refuses(router.port))
            with identity.trusted().wrap_socket(late, server_hostname="127.0.0.1") as secure:
                secure.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                answer = b"".join(iter(lambda: secure.recv(1 << 16), b""))
            head = answer.partition(b"\r\n\r\n")[0].lower()
            assert head.startswith(b"http/1.1 200") and b"\r\nconnection: close" in head
            router.decode.go_on.set()
            assert b"".join(events).endswith(HELD_EVENTS[-1])
        assert router.process.wait(20) == -signal.SIGTERM  # drained


def test_engines_by_https(identity: Identity) -> None:
    more = ["--engine-ca", str(identity.cert)]
    with router_process(more=more, engine_tls=identity.server()) as router:
        url = f"http://127.0.0.1:{router.port}"
        got = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, trust_env=False, timeout=30)
        assert got.status_code == 200 and got.headers["x-kvferry-path"] == "prefill+decode"
    with router_process(engine_tls=identity.server()) as router:  # signed by nobody that it knows
        health = httpx.get(f"http://127.0.0.1:{router.port}/health", trust_env=False).json()
        assert health["status"] == "down"
        assert all("certificate verify failed" in e["reason"] for e in health["engines"])
        assert router.decode.asked == 0


def test_certificates_that_cannot_be_used(identity: Identity, tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("nothing")
    locked = tmp_path / "locked.pem"
    command = ["openssl", "ec", "-in", str(identity.key), "-aes256", "-passout", "pass:geheim"]
    subprocess.run([*command, "-out", str(locked)], check=True, capture_output=True)
    for more, words in (
        (["--tls-cert", str(identity.cert)], "name both, or neither"),
        (["--tls-cert", str(identity.cert), "--tls-key", str(tmp_path / "no")], "cannot use"),
        (["--tls-cert", str(tmp_path / "bad.pem"), "--tls-key", str(identity.key)], "cannot use"),
        (["--tls-cert", str(identity.cert), "--tls-key", str(locked)], "cannot use"),
        (["--engine-ca", str(tmp_path / "bad.pem")], "cannot read certificates"),
    ):
        with pytest.raises(AssertionError, match=words), router_process(more=more):
            pass


def test_a_port_that_speaks_tls_counts_connections_before_the_handshake(
    identity: Identity,
) -> None:
    limits = {"max_connections": 4, "address_share": 1, "header_seconds": 60}
    with router_process(limits, more=arguments(identity)) as router, ExitStack() as stack:
        silent = [stack.enter_context(router.connect()) for _ in range(8)]
        gone = 0
        for sock in silent[:4]:  # the oldest give way
            with suppress(ConnectionError):
                sock.settimeout(10)
                assert sock.recv(1) == b""
            gone += 1
        assert gone == 4
        silent[7].settimeout(0.2)
        with pytest.raises((TimeoutError, socket.timeout)):
            silent[7].recv(1)


def test_a_connection_that_is_lost_in_its_handshake_gives_its_place_back(
    identity: Identity,
) -> None:
    made = connections_of({}, Limits(header_seconds=0.3), identity.server())

    async def inside() -> None:
        loop, state = asyncio.get_running_loop(), ServerState()
        server = await loop.create_server(lambda: made(server_state=state), "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"\x16\x03\x01")  # a part of a greeting, and nothing more
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()
            async with asyncio.timeout(20):
                while made.guard._quota.taken:
                    await asyncio.sleep(0.01)

    asyncio.run(inside())
