"""The admin API, its command line, fleet files, names and keys, before real servers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.errors import DescriptionError
from kvferry.router.api import COMMAND_LINE, ApiError, EngineSpec, RouterConfig
from kvferry.router.fleet.sources import (
    Sources,
    WatchedFile,
    read_fleet,
    reconcile,
)
from kvferry.router.keys import EngineKey, Secrets, admin_token
from router_cluster import (
    CHUNKS,
    QUICK,
    WHOLE,
    Cluster,
    FakeEngine,
    Server,
    cluster,
    decoders,
    quick,
)
from waiting import require_for, wait_until

TOKEN = "a-token-of-some-length"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
PATH = "/admin/engines"


@contextmanager
def more_engines(*names: str) -> Iterator[list[tuple[FakeEngine, str]]]:
    with ExitStack() as stack:
        made = []
        for name in names:
            engine = FakeEngine(name)
            server = Server(engine)
            stack.callback(server.kill)
            made.append((engine, server.url))
        yield made


def ask(c: Cluster, method: str, at: str | None = None, /, **body: Any) -> httpx.Response:
    query = {} if at is None else {"url": at}
    content = json.dumps(body) if body else None
    return c.client.request(method, PATH, params=query, content=content, headers=BEARER)


def engines(c: Cluster) -> dict[str, dict[str, Any]]:
    return {engine["url"]: engine for engine in ask(c, "GET").json()["engines"]}


def test_engines_come_change_and_go_while_requests_run() -> None:
    with cluster(token=TOKEN) as c, more_engines("d9") as [(late, url)]:
        got = ask(c, "POST", url=url, roles=["decode"], weight=2)
        assert got.status_code == 201
        assert got.json() == {
            "url": url,
            "roles": ["decode"],
            "events": None,
            "replay": None,
            "weight": 2.0,
            "source": "the admin API",
            "up": False,
            "trial": 0,
            "was_up": False,
            "reason": "its first probe is pending",
            "draining": None,
            "removed": False,
            "in_flight": 0,
            "idle": True,
        }
        wait_until(lambda: engines(c)[url]["up"])
        assert ask(c, "POST", url=url, roles=["decode"]).status_code == 409

        # A stream runs at the new engine while it drains.
        d0 = c.servers["d0"].url
        assert ask(c, "PATCH", d0, draining="stay").json()["draining"] == "stay"
        late.always = "gate"
        late.gate.release()
        body = {"prompt": "x", "stream": True}
        with c.client.stream("POST", "/v1/completions", json=body) as got:
            chunks = got.iter_raw()
            assert next(chunks) == CHUNKS[0]
            assert ask(c, "PATCH", d0, draining=None).json()["draining"] is None
            assert not ask(c, "PATCH", url, draining="remove").json()["removed"]
            for _ in range(3):
                assert c.complete().content == WHOLE
            assert len(late.seen) == 1 and len(c.decode[0].seen) == 3
            assert engines(c)[url]["in_flight"] == 1
            late.gate.release(10)
            assert b"".join(chunks) == b"".join(CHUNKS[1:])
        wait_until(lambda: url not in engines(c))
        assert c.metric("engine_up", f'engine="{d0}",role="decode"') == 1

        # Its role changes: what prefilled now decodes.
        p0 = c.servers["p0"].url
        assert ask(c, "PATCH", p0, roles=["decode", "prefill"]).json()["roles"] == [
            "prefill",
            "decode",
        ]
        assert ask(c, "DELETE", d0).json()["removed"]
        got = c.complete()
        assert got.content == WHOLE  # by the engine with both roles, which hands over to nobody
        assert got.headers["x-kvferry-path"] == "decode-only"
        assert len(c.decode[0].seen) == 3
        assert ask(c, "DELETE", d0).status_code == 404


def test_one_engine_with_both_roles_beside_another() -> None:
    with more_engines("a", "b") as [(a, first), (b, second)]:
        with cluster(0, 0, both=(first, second)) as c:
            for _ in range(4):
                got = c.complete()
                assert got.headers["x-kvferry-path"] == "prefill+decode"
        for one, other in ((a, b), (b, a)):
            for seen in one.seen:
                params = seen.body["kv_transfer_params"]
                if "remote_engine_id" in params:
                    assert params["remote_engine_id"] == other.name  # never its own ticket
        assert len(a.seen) == len(b.seen) == 4


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": TOKEN},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": "Bearer " + "x" * 20_000},
        [("Authorization", "Bearer wrong"), ("Authorization", f"Bearer {TOKEN}")],
        [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer wrong")],
    ],
)
def test_the_admin_api_needs_its_token(headers: Any) -> None:
    with cluster(token=TOKEN, api_keys_file=None) as c:
        for method in ("GET", "POST", "PATCH", "DELETE"):
            got = c.client.request(method, PATH, headers=headers, json={"url": "http://evil"})
            assert (got.status_code, got.json()["error"]["code"]) == (401, "invalid_api_key")
            assert got.headers["www-authenticate"] == "Bearer"
            assert TOKEN not in got.text
        assert len(engines(c)) == 2


def test_without_a_token_there_is_no_admin_api() -> None:
    with cluster() as c:
        for method in ("GET", "POST", "PATCH", "DELETE"):
            got = c.client.request(method, PATH, headers=BEARER)
            assert (got.status_code, got.json()["error"]["code"]) == (404, "not_found")


def test_what_the_admin_api_refuses(caplog: pytest.LogCaptureFixture) -> None:
    with cluster(token=TOKEN, limits=QUICK) as c:
        d0 = c.servers["d0"].url
        new = {"url": "http://h:1", "roles": ["decode"]}
        for changes, words in (
            ({"url": "http://me:s3cret@h:1"}, "a user or a password"),
            ({"url": "ftp://h"}, "write http://host:port"),
            ({"url": 7}, "Expected `str`"),
            ({"url": "dns://h:1"}, "a name is for the command line"),
            ({"roles": []}, "expected prefill, decode, or both"),
            ({"roles": ["root"]}, "Invalid enum value 'root'"),
            ({"roles": "decode"}, "Expected `array`"),
            ({"weight": -1}, "the weight of"),
            ({"weight": "x"}, "Expected `float`"),
            ({"events": "ipc:///etc/passwd"}, "expected tcp://host:port"),
            ({"source": "the command line"}, "an engine has no 'source'"),
        ):
            got = ask(c, "POST", **(new | changes))
            assert got.status_code == 400, got.text
            assert words in got.json()["error"]["message"], got.text
            assert "s3cret" not in got.text
        for content, status in (
            (b"", 400),
            (b"[1]", 400),
            (b"\xff", 400),
            (b"[" * 60_000, 400),
            (b'{"url": "' + b"x" * 70_000, 413),
        ):
            got = c.client.post(PATH, content=content, headers=BEARER)
            assert got.status_code == status, got.text
        endless = c.client.post(PATH, content=iter([b" " * 40_000] * 4), headers=BEARER)
        assert endless.status_code == 413
        for url, body, status in (
            ("http://nobody:1", {"draining": "stay"}, 404),
            ("http://me:s3cret@h", {"draining": "stay"}, 400),
            (d0, {"draining": "later"}, 400),
            (d0, {"url": "http://other"}, 400),
            (d0, {"colour": "red"}, 400),
        ):
            got = ask(c, "PATCH", url, **body)
            assert got.status_code == status, got.text
            assert "s3cret" not in got.text
        assert c.client.delete(PATH, headers=BEARER).status_code == 400
        assert c.client.put(PATH, headers=BEARER).status_code == 405
        assert engines(c)[d0]["roles"] == ["decode"] and len(engines(c)) == 2
        assert "s3cret" not in caplog.text and TOKEN not in caplog.text
        assert c.complete().content == WHOLE


def test_the_command_line_changes_a_fleet(tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")

    def run(*arguments: str, status: int = 0) -> str:
        got = CliRunner().invoke(app, ["router", *arguments])
        assert got.exit_code == status, got.output
        return " ".join(got.output.split())

    with cluster(token=TOKEN) as c, more_engines("d9") as [(_, url)]:
        to = ("--router", str(c.client.base_url), "--token-file", str(file))
        assert run("add", url, "--role", "decode", "--role", "prefill", *to).startswith(
            f"{url} prefill+decode not up yet: its first probe is pending"
        )
        wait_until(lambda: f"{url} prefill+decode up the admin API 0" in run("list", *to))
        assert [e["url"] for e in json.loads(run("list", "--json", *to))] == [
            c.servers["p0"].url,
            c.servers["d0"].url,
            url,
        ]
        assert run("change", url, "--role", "decode", *to) == f"{url} decode up"
        d0 = c.servers["d0"].url
        assert run("drain", d0, "--stay", "--wait", "20", *to) == f"{d0} decode up, drained"
        assert c.complete().status_code == 200 and c.decode[0].seen == []
        assert run("add", d0, "--role", "decode", *to) == f"{d0} decode up"
        assert run("drain", url, *to) == f"{url} decode removed"
        last = f"{d0} decode removed This was the last decode engine: requests get 503 until one"
        assert run("remove", d0, *to) == f"{last} is added"
        assert "is not in the fleet" in run("remove", d0, *to, status=2)
        other = ("list", *to[:2], "--token-file", str(other_token(tmp_path)))
        assert run(*other, status=2) == (
            f"error: the router at {to[1]} does not know this token; use the one that it was "
            "started with (--token-file, or KVFERRY_ROUTER_TOKEN)"
        )
        assert run("list", *to[:2], status=2) == (
            "error: the router's token is needed: name its file with --token-file, or set "
            "KVFERRY_ROUTER_TOKEN. A router that was started without one must be restarted with "
            "--token-file (--take-over keeps its streams)"
        )
        monkeypatch.setenv("KVFERRY_ROUTER_TOKEN", TOKEN)
        assert "down" not in run("list", *to[:2])
    assert "gave no answer" in run("list", *to, status=2)
    with cluster() as c:
        said = run("list", "--router", str(c.client.base_url), status=2)
        assert "it has no admin API; it must be restarted with --token-file (--take" in said


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, '{"detail": "Not Found"}'),
        (404, '{"error": "no"}'),
        (404, "[]"),
        (200, "<html></html>"),
        (200, '{"healthy": true}'),
    ],
)
def test_the_command_line_names_a_server_that_is_no_router(
    status: int, body: str, monkeypatch: Any
) -> None:
    """vLLM's own default port is the router's: an engine answers there with a JSON of its own."""

    class Engine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            """Standard error has the command's message alone."""

    monkeypatch.setenv("KVFERRY_ROUTER_TOKEN", TOKEN)
    with HTTPServer(("127.0.0.1", 0), Engine) as server:
        Thread(target=server.handle_request, daemon=True).start()
        at = f"http://127.0.0.1:{server.server_port}"
        got = CliRunner().invoke(app, ["router", "list", "--router", at])
    said = " ".join(got.output.split())
    assert (got.exit_code, said) == (
        2,
        f"error: {at} answered with status {status}, but not as a kvferry router does; is the "
        "address right? Name the router's with --router",
    )


def test_an_engine_that_drained_is_taken_back_as_it_was(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("KVFERRY_ROUTER_TOKEN", TOKEN)
    with cluster(token=TOKEN) as c, more_engines("b9") as [(_, url)]:

        def add(*arguments: str) -> tuple[int, str]:
            to = ("--router", str(c.client.base_url))
            got = CliRunner().invoke(app, ["router", "add", *arguments, *to])
            return got.exit_code, " ".join(got.output.split())

        assert add(url) == (
            2,
            f"error: {url} is not in the fleet, so its roles must be said: prefill, decode or both "
            "(kvferry router add --role)",
        )
        events = ("--events", "tcp://*:5557", "--weight", "2")
        assert add(url, "--role", "prefill", "--role", "decode", *events)[0] == 0
        before = engines(c)[url]
        ask(c, "PATCH", url, draining="stay")
        status, said = add(url)
        assert status == 0 and said.startswith(f"{url} prefill+decode ")
        kept = ("roles", "events", "weight", "draining")
        assert [engines(c)[url][name] for name in kept] == [before[name] for name in kept]
        assert "is in the fleet, as prefill+decode" in add(url)[1]
        ask(c, "PATCH", url, draining="stay")
        assert add(url, "--role", "prefill", "--weight", "3")[0] == 0  # what is said counts
        after = engines(c)[url]
        assert (after["roles"], after["weight"]) == (["prefill"], 3.0)
        assert after["events"] == before["events"] != None  # noqa: E711


def test_without_the_last_decode_engine_there_is_a_warning() -> None:
    with cluster(token=TOKEN) as c, more_engines("d9") as [(_, url)]:
        p0, d0 = c.servers["p0"].url, c.servers["d0"].url
        ask(c, "POST", url=url, roles=["decode"])
        last = "this was the last decode engine: requests get 503 until one is added"
        for at, body, warned in (
            (p0, {"draining": "stay"}, None),
            (url, {"draining": "stay"}, None),
            (d0, {"weight": 2}, None),
            (d0, {"draining": "stay"}, last),
            (d0, {"draining": None}, None),
            (d0, {"roles": ["prefill"]}, last),
            (d0, {"roles": ["decode"]}, None),
        ):
            got = ask(c, "PATCH", at, **body)
            assert (got.status_code, got.json().get("warning")) == (200, warned), got.text
        assert ask(c, "DELETE", d0).json()["warning"] == last
        assert "warning" not in ask(c, "DELETE", p0).json()
        got = ask(c, "DELETE", url)  # drained before
        assert got.json()["warning"] == last
        got = c.complete()
        assert got.status_code == 503
        assert got.json()["error"]["message"] == (
            "the fleet has no decode engine; add one: kvferry router add URL --role decode"
        )


def other_token(folder: Path) -> Path:
    (folder / "other").write_text("another-token-of-some-length")
    return folder / "other"


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_fleet_file_is_watched(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"fleet.{suffix}"

    def write(*specs: dict[str, Any]) -> None:
        if suffix == "json":
            text = json.dumps({"engines": specs})
        else:
            text = "".join(
                "[[engines]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in spec.items())
                for spec in specs
            )
        replace_file(text)

    def replace_file(text: str) -> None:  # a file that is half written would be refused too
        part = tmp_path / "part"
        part.write_text(text)
        part.rename(file)

    with more_engines("a", "b") as [(a, first), (b, second)]:
        write({"url": first, "roles": ["decode"]})
        limits = quick(reload_seconds=0.05)
        with cluster(0, 0, limits, fleet_file=file, token=TOKEN) as c:
            assert c.complete().content == WHOLE and len(a.seen) == 1
            a.always = "gate"
            a.gate.release()
            body = {"prompt": "x", "stream": True}
            with c.client.stream("POST", "/v1/completions", json=body) as got:
                chunks = got.iter_raw()
                next(chunks)
                write({"url": second, "roles": ["decode"], "events": "tcp://*:5557"})
                wait_until(lambda: engines(c).get(second, {}).get("up"))
                assert engines(c)[second]["events"] == "tcp://127.0.0.1:5557"
                assert engines(c)[first]["draining"] == "remove"
                assert c.complete().content == WHOLE and len(b.seen) == 1
                a.gate.release(10)
                assert b"".join(chunks) == b"".join(CHUNKS[1:])  # the running stream ends well
            wait_until(lambda: first not in engines(c))

            # Files that cannot be used are refused, and the fleet stays.
            for text in ("{", "", "engines = 7", '{"engines": []}', '{"engines": [{"url": "x"}]}'):
                refused = c.metric("reloads_total", 'file="fleet",result="refused"')
                replace_file(text)
                c.expect("reloads_total", 'file="fleet",result="refused"', count=refused + 1)
                c.expect("file_good", 'file="fleet"', count=0)
                assert list(engines(c)) == [second]
            file.unlink()
            c.expect("reloads_total", 'file="fleet",result="refused"', count=refused + 2)
            write({"url": second, "roles": ["decode"]}, {"url": first, "roles": ["prefill"]})
            wait_until(lambda: engines(c).get(first, {}).get("up"))
            c.expect("file_good", 'file="fleet"', count=1)
            assert engines(c)[second]["events"] is None
            assert c.complete().headers["x-kvferry-path"] == "prefill+decode"

            # What the file names is changed there; it can be drained to stay.
            for got in (ask(c, "DELETE", first), ask(c, "PATCH", first, roles=["decode"])):
                assert got.status_code == 409 and str(file) in got.json()["error"]["message"]
            assert ask(c, "PATCH", first, draining="remove").status_code == 409
            assert ask(c, "PATCH", first, draining="stay").status_code == 200
            write({"url": second, "roles": ["decode"]}, {"url": first, "roles": ["decode"]})
            wait_until(lambda: engines(c)[first]["roles"] == ["decode"])
            assert engines(c)[first]["draining"] == "stay"  # an operator said so
            taken_back = ask(c, "POST", url=first, roles=["prefill"]).json()
            assert (taken_back["draining"], taken_back["roles"]) == (None, ["decode"])
            assert taken_back["source"] == str(file)


def test_what_is_wrong_with_a_fleet_file_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"

    def start(text: str, **config: Any) -> None:
        from kvferry.router.flow import Router

        file.write_text(text)
        Router(RouterConfig((), config.pop("decode", ()), QUICK, fleet_file=file, **config))

    for text, words in (
        ("[]", "must have `engines`"),
        ('{"engines": 1}', "must be a list"),
        ('{"engines": [], "more": 1}', "and nothing else"),
        ('{"engines": [7]}', "must be an object"),
        ('{"engines": [{"url": "h:1"}]}', "missing required field `roles`"),
        ('{"engines": [{"url": "h:1", "roles": ["prefill"]}]}', "leaves no decode engine"),
        ('{"engines": [{"url": "me:s3cret@h", "roles": ["decode"]}]}', "a user or a password"),
        (
            '{"engines": [{"url": "h:1", "roles": ["decode"]}, {"url": "H:1", "roles": []}]}',
            "expected prefill, decode",
        ),
        (
            '{"engines": [{"url": "h:1", "roles": ["decode"]}, '
            '{"url": "H:1/v1", "roles": ["decode"]}]}',
            "named 2 times",
        ),
        (
            '{"engines": [{"url": "dns://h:1", "roles": ["decode"]}, '
            '{"url": "dns://h:1", "roles": ["prefill"]}]}',
            "named more than once",
        ),
        ("[" * 100_000, "cannot be read"),
    ):
        with pytest.raises(DescriptionError, match=words) as error:
            start(text)
        assert "s3cret" not in str(error.value)
    with pytest.raises(DescriptionError, match="named by the command line and by"):
        start('{"engines": [{"url": "h:1", "roles": ["decode"]}]}', decode=("h:1",))
    with pytest.raises(DescriptionError, match="cannot read"):
        RouterConfig((), (), QUICK, fleet_file=tmp_path / "none") and Sources(
            decoders(""), QUICK
        ).watch_fleet(tmp_path / "none")
    assert read_fleet(b'[[engines]]\nurl="h:1"\nroles=["decode"]', Path("f.toml"))[0].weight == 1


def test_a_refused_source_changes_nothing() -> None:
    fleet = decoders("a")
    specs = [EngineSpec(f"http://{n}", frozenset(["decode"]), source="s") for n in "bcd"]
    with pytest.raises(DescriptionError, match="named by the command line and by s"):
        reconcile(fleet, "s", [specs[0], EngineSpec("a", frozenset(["decode"]), source="s")])
    assert [e.url for e in fleet.engines] == ["http://a"]
    reconcile(fleet, "s", specs[:2])
    assert [e.url for e in fleet.engines] == ["http://a", "http://b", "http://c"]
    reconcile(fleet, "s", [])
    assert [e.url for e in fleet.engines] == ["http://a"]


def test_a_watched_file_is_used_when_its_contents_change(tmp_path: Path) -> None:
    path = tmp_path / "f"
    used: list[bytes] = []

    def use(data: bytes) -> None:
        if b"bad" in data:
            raise DescriptionError("bad words")
        used.append(data)

    path.write_bytes(b"1")
    file = WatchedFile("f", path, use)
    file.read()
    os.utime(path, ns=(1, 1))
    file.look()  # touched, and the same
    assert used == [b"1"] and file.used == 1
    path.write_bytes(b"bad")
    for _ in range(3):
        file.look()
        os.utime(path)
    assert (file.refused, file.problem) == (1, "bad words")
    path.write_bytes(b"1")
    file.look()
    assert (used, file.problem) == ([b"1", b"1"], "")
    other = tmp_path / "g"
    other.write_bytes(b"2")
    path.unlink()
    file.look()
    file.look()
    assert "No such file" in file.problem and file.refused == 2
    path.symlink_to(other)
    file.look()
    assert used == [b"1", b"1", b"2"] and file.problem == ""


def test_a_file_that_another_source_was_in_the_way_of_is_used_later(tmp_path: Path) -> None:
    fleet, path = decoders("a"), tmp_path / "fleet.json"
    sources = Sources(fleet, quick())

    def write(*names: str) -> None:
        said = [{"url": f"http://{name}", "roles": ["decode"]} for name in names]
        path.write_text(json.dumps({"engines": said}))

    write("b")
    sources.watch_fleet(path)
    (file,) = sources.files
    other = fleet.add(EngineSpec("http://c", frozenset(["decode"]), source="the admin API"))
    write("b", "c")
    for _ in range(3):
        file.look()
    assert (file.used, file.refused) == (1, 1) and "named by the admin API" in file.problem
    fleet.remove(other)
    file.look()
    assert (file.used, file.refused, file.problem) == (2, 1, "")
    added = fleet.get("http://c")
    assert added is not None and added.spec.source == str(path)


def test_names_are_resolved_again_and_again() -> None:
    found: dict[str, Any] = {"d.example": ["10.0.0.1", "fd00::1"], "p.example": ["10.0.0.9"]}

    async def resolve(host: str) -> list[str]:
        answer = found[host]
        if isinstance(answer, Exception):
            raise answer
        if answer == "never":
            await asyncio.sleep(60)
        return answer

    async def run() -> None:
        fleet = decoders("")
        sources = Sources(fleet, quick(connect_seconds=0.05), resolve)
        config = RouterConfig(("dns://p.example:81",), ("dns://D.example:80",))
        sources.names.use(COMMAND_LINE, [s for s in config.specs() if s.is_name])

        def urls(role: Any) -> list[str]:
            return [e.url for e in fleet.with_role(role) if e.draining is None]

        await sources.names.refresh()
        assert urls("decode") == ["http://10.0.0.1:80", "http://[fd00::1]:80"]
        assert urls("prefill") == ["http://10.0.0.9:81"]
        busy = fleet.get("http://10.0.0.1:80")
        assert busy is not None and busy.spec.source == "dns://d.example:80"
        busy.in_flight = 1
        found["d.example"] = ["fd00::1", "10.0.0.2"]
        await sources.names.refresh()
        assert urls("decode") == ["http://[fd00::1]:80", "http://10.0.0.2:80"]
        assert busy.draining == "remove" and fleet.get(busy.url) is busy
        for trouble in (socket.gaierror("no"), [], "never"):
            failures = sources.names.failures
            found["d.example"] = trouble
            await sources.names.refresh()
            assert sources.names.failures == failures + 1
            assert urls("decode") == ["http://[fd00::1]:80", "http://10.0.0.2:80"]
            for lookup in list(sources.names._lookups.values()):
                lookup.cancel()
            await asyncio.sleep(0)
        sources.names.use(COMMAND_LINE, [])
        assert urls("decode") == urls("prefill") == []

    asyncio.run(run())
    for url in ("dns://h", "dns://h:80/path", "dns://me:s3cret@h:1", "dns://:80"):
        with pytest.raises(DescriptionError) as error:
            RouterConfig((), (url,))
        assert "s3cret" not in str(error.value)


def test_a_router_before_a_name() -> None:
    with more_engines("d") as [(engine, url)]:
        name = url.replace("http://127.0.0.1", "dns://localhost")
        with cluster(0, 0, decode_urls=(name,)) as c:
            assert c.complete().content == WHOLE
            assert len(engine.seen) == 1


def test_api_keys_are_asked_for_and_passed_on(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    digest = hashlib.sha256(b"second-key").hexdigest()
    keys.write_text(f"# clients\nfirst-key\n\nsha256:{digest}\n")
    limits = quick(reload_seconds=0.05)
    with cluster(limits=limits, api_keys_file=keys) as c:
        for key in ("first-key", "second-key"):
            assert c.complete({"Authorization": f"Bearer {key}"}).content == WHOLE
            assert c.decode[0].seen[-1].headers["authorization"] == f"Bearer {key}"
        asked = len(c.prefill[0].seen)
        for headers in ({}, {"Authorization": f"Bearer {digest}"}, {"Authorization": "first-key"}):
            for got in (c.complete(headers), c.client.get("/v1/models", headers=headers)):
                assert (got.status_code, got.json()["error"]["code"]) == (401, "invalid_api_key")
                assert got.json()["error"]["type"] == "invalid_request_error"
                assert "x-request-id" in got.headers
        assert len(c.prefill[0].seen) == asked
        c.expect("requests_total", 'outcome="unauthorized"', count=6)
        assert c.client.get("/health").status_code == 200  # for load balancers
        keys.write_text("third-key\n")
        wait_until(lambda: c.complete({"Authorization": "Bearer third-key"}).status_code == 200)
        assert c.complete({"Authorization": "Bearer first-key"}).status_code == 401
        keys.write_text("\n")  # no key at all would lock everybody out, or let everybody in
        c.expect("file_good", 'file="api_keys"', count=0)
        require_for(0.2, lambda: c.complete({"Authorization": "Bearer third-key"}).is_success)
        text = c.client.get("/metrics").text + c.client.get("/").text
        assert "third-key" not in text


def test_engines_get_a_key_of_their_own(tmp_path: Path) -> None:
    key = tmp_path / "engine"
    key.write_text("for-engines\n")
    limits = quick(reload_seconds=0.05)
    with cluster(limits=limits, engine_key_file=key) as c:
        for headers in ({}, {"Authorization": "Bearer mine"}):
            assert c.complete(headers).content == WHOLE
            for seen in (c.prefill[0].seen[-1], c.decode[0].seen[-1]):
                assert seen.headers["authorization"] == "Bearer for-engines"
        key.write_text("rotated")
        c.expect("reloads_total", 'file="engine_key",result="used"', count=2)
        c.complete()
        assert c.decode[0].seen[-1].headers["authorization"] == "Bearer rotated"


def test_secrets_that_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    for data in (b"", b"# none\n", b"short", b"has a space in it", b"sha256:12", b"k\xff" * 9):
        with pytest.raises(DescriptionError) as error:
            Secrets("API key").use(data)
        assert "space in" not in str(error.value)
    with pytest.raises(DescriptionError):
        EngineKey().use(b"two\nlines")
    with pytest.raises(ApiError):
        Secrets("API key").require([(b"authorization", b"Bearer ")])
    file = tmp_path / "token"
    for text in ("", "short", "has a space and is long"):
        file.write_text(text)
        with pytest.raises(DescriptionError, match="openssl rand"):
            admin_token(file)
    with pytest.raises(DescriptionError, match="cannot read"):
        admin_token(tmp_path / "none")
    monkeypatch.delenv("KVFERRY_ROUTER_TOKEN", raising=False)
    assert admin_token(None) is None
    monkeypatch.setenv("KVFERRY_ROUTER_TOKEN", "")
    assert admin_token(None) is None


@pytest.mark.parametrize("option", ["--fleet", "--api-keys", "--engine-key-file"])
def test_a_file_that_is_not_there_is_named_with_its_option(option: str, tmp_path: Path) -> None:
    words = ["router", "--decode", "h:1", option, str(tmp_path / "none")]
    got = CliRunner().invoke(app, words)
    said = f"error: {option}: cannot read {tmp_path}/none: No such file or directory\n"
    assert (got.exit_code, got.stderr) == (2, said)


def test_events_of_the_command_line() -> None:
    config = RouterConfig(
        ("p:1",), ("d:2",), both=("b:3",), events=("*=tcp://*:5557", "d:2=tcp://x:1,tcp://x:2")
    )
    assert {s.url: (s.events, s.replay, sorted(s.roles)) for s in config.specs()} == {
        "http://p:1": ("tcp://p:5557", None, ["prefill"]),
        "http://d:2": ("tcp://x:1", "tcp://x:2", ["decode"]),
        "http://b:3": ("tcp://b:5557", None, ["decode", "prefill"]),
    }
    for text in ("d:2", "other:1=tcp://x:1", "d:2=udp://x:1", "d:2="):
        with pytest.raises(DescriptionError):
            RouterConfig((), ("d:2",), events=(text,))
    with pytest.raises(DescriptionError, match="named twice"):
        RouterConfig(("h:1",), ("d:1",), both=("h:1",))
    assert "s3cret" not in repr(RouterConfig((), (), token="s3cret"))
