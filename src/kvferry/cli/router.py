# SPDX-License-Identifier: Apache-2.0
"""`kvferry router`: serve, and change the fleet of a router that runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from kvferry.cli.console import Commands, Json, err, print_json, print_table, refusals, say
from kvferry.errors import DescriptionError, KvferryError, install_command
from kvferry.router.api import Limits, RouterConfig, base_url
from kvferry.router.keys import admin_token

app = Commands(invoke_without_command=True)

Router = Annotated[str, typer.Option("--router", help="Address of the router.")]
Token = Annotated[
    Path | None, typer.Option("--token-file", help="The router's token; else KVFERRY_ROUTER_TOKEN.")
]
Ca = Annotated[Path | None, typer.Option("--ca", help="Certificate authority of the router.")]
Urls = Annotated[list[str], typer.Argument(metavar="URL", help="Addresses of engines.")]
HERE = "http://127.0.0.1:8000"
_ANSWER_SECONDS = 10.0
_POLL_SECONDS = 0.5
_WITH_TOKEN = "restarted with --token-file (--take-over keeps its streams)"


@app.callback()
def router(
    context: typer.Context,
    decode: Annotated[
        list[str] | None,
        typer.Option(help="URL of a decode engine, or dns://name:port; may be repeated."),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(help="URL of a prefill engine; may be repeated. Without: decode only."),
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="URL of an engine with both roles; may be repeated.")
    ] = None,
    engine_events: Annotated[
        list[str] | None,
        typer.Option(help="KV events of an engine, URL=tcp://host:port[,replay]; may be repeated."),
    ] = None,
    fleet: Annotated[
        Path | None, typer.Option(help="File with engines, TOML or .json; read when it changes.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate, with its chain, to serve HTTPS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="Token of the admin API; else KVFERRY_ROUTER_TOKEN. Without: no API."),
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option(help="File with clients' keys, one a line, plain or sha256:hex.")
    ] = None,
    engine_key_file: Annotated[
        Path | None, typer.Option(help="Key that engines get in place of the clients'.")
    ] = None,
    engine_ca: Annotated[
        Path | None, typer.Option(help="Certificate authority of engines with https.")
    ] = None,
    place: Annotated[
        str, typer.Option(help="cost: where the first token comes soonest; load: fewest requests.")
    ] = "cost",
    tokenizer: Annotated[
        Path | None, typer.Option(help="A model's folder, to tokenize here and not at engines.")
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the port over from the router that has it.")
    ] = False,
    limit: Annotated[
        list[str] | None,
        typer.Option(help="A limit as name=value (docs/configuration.md); may be repeated."),
    ] = None,
) -> None:
    """Serve an OpenAI-compatible API: prefill on one engine, decode on another."""
    if context.invoked_subcommand is not None:
        return
    with refusals():
        with _extra():
            from kvferry.router.app import serve
            from kvferry.router.server import Listen
        config = RouterConfig(
            tuple(prefill or ()),
            tuple(decode or ()),
            Limits.read(limit or []),
            tuple(engine or ()),
            tuple(engine_events or ()),
            fleet,
            admin_token(token_file),
            api_keys,
            engine_key_file,
            engine_ca,
            cast(Any, place),  # RouterConfig refuses other words
            tokenizer,
        )
        serve(config, Listen(host, port, tls_cert, tls_key, take_over))


@app.command("list")
def show(at: Router = HERE, token_file: Token = None, ca: Ca = None, as_json: Json = False) -> None:
    """Show the engines of a router."""
    with refusals():
        engines = _ask(at, token_file, ca, "GET")["engines"]
    if as_json:
        print_json(engines)
        return
    rows = [
        (e["url"], "+".join(e["roles"]), _state(e), e["source"], str(e["in_flight"]))
        for e in engines
    ]
    print_table(["engine", "roles", "state", "from", "in flight"], rows, words=4)


@app.command()
def add(
    urls: Urls,
    role: Annotated[
        list[str] | None,
        typer.Option(help="prefill or decode; twice for both. A known engine keeps its roles."),
    ] = None,
    events: Annotated[
        str | None, typer.Option(help="Its KV events, tcp://host:port; host *: its own.")
    ] = None,
    replay: Annotated[str | None, typer.Option(help="Where lost events are sent again.")] = None,
    weight: Annotated[
        float | None, typer.Option(help="Its share of requests; 1 for a new engine.")
    ] = None,
    at: Router = HERE,
    token_file: Token = None,
    ca: Ca = None,
) -> None:
    """Add engines, or take back draining ones. These keep all settings that are not given here."""
    said = {"roles": role or None, "events": events, "replay": replay, "weight": weight}
    more = {name: value for name, value in said.items() if value is not None}
    _each(urls, lambda url: _ask(at, token_file, ca, "POST", body={"url": url, **more}))


@app.command()
def change(
    urls: Urls,
    role: Annotated[list[str] | None, typer.Option(help="Its roles from now on.")] = None,
    weight: Annotated[float | None, typer.Option(help="Its share of requests.")] = None,
    at: Router = HERE,
    token_file: Token = None,
    ca: Ca = None,
) -> None:
    """Change the roles or the weight of engines."""
    said = {"roles": role or None, "weight": weight}
    body = {name: value for name, value in said.items() if value is not None}
    _each(urls, lambda url: _ask(at, token_file, ca, "PATCH", url, body))


@app.command()
def drain(
    urls: Urls,
    stay: Annotated[
        bool,
        typer.Option("--stay", help="Keep it afterwards, without requests; add takes it back."),
    ] = False,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for its requests. Status 1: some still run.")
    ] = 0.0,
    at: Router = HERE,
    token_file: Token = None,
    ca: Ca = None,
) -> None:
    """Send engines no new requests, and remove them when the running ones have ended."""
    body = {"draining": "stay" if stay else "remove"}
    _each(urls, lambda url: _ask(at, token_file, ca, "PATCH", url, body))
    deadline = time.monotonic() + wait
    with refusals():
        while wait > 0:
            engines = _ask(at, token_file, ca, "GET")["engines"]
            busy = {e["url"] for e in engines if not e["idle"]} & {base_url(url) for url in urls}
            if not busy:
                break
            if time.monotonic() > deadline:
                say(f"requests still run at {', '.join(sorted(busy))}")
                raise typer.Exit(1)
            time.sleep(_POLL_SECONDS)


@app.command()
def remove(urls: Urls, at: Router = HERE, token_file: Token = None, ca: Ca = None) -> None:
    """Remove engines at once. Requests that run there go on to their end."""
    _each(urls, lambda url: _ask(at, token_file, ca, "DELETE", url))


@contextmanager
def _extra() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise DescriptionError(
            f"the router needs the extra 'router' ({error}): {install_command('router')}"
        ) from None


def _each(urls: list[str], do: Callable[[str], dict[str, Any]]) -> None:
    for url in urls:
        with refusals():
            engine = do(url)
            print(f"{engine['url']} {'+'.join(engine['roles'])} {_state(engine)}", flush=True)
            if warning := engine.get("warning"):
                err.print(f"{warning[0].upper()}{warning[1:]}", style="yellow", highlight=False)


def _state(engine: dict[str, Any]) -> str:
    if engine["removed"]:
        return "removed"
    state = "up"
    if not engine["up"]:
        state = f"{'down' if engine['was_up'] else 'not up yet'}: {engine['reason']}"
    if engine["trial"]:
        state += ", on trial"
    if engine["draining"]:
        done = "drained" if engine["idle"] else "draining"
        state += f", {done}" + (", then removed" if engine["draining"] == "remove" else "")
    return state


def _ask(
    at: str,
    token_file: Path | None,
    ca: Path | None,
    method: str,
    url: str | None = None,
    body: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Ask a router's admin API. Raises KvferryError."""
    with _extra():
        import httpx

        from kvferry.router.fleet.admin import PATH
        from kvferry.router.fleet.engines import trusting
    token = admin_token(token_file)
    if token is None:
        raise DescriptionError(
            "the router's token is needed: name its file with --token-file, or set "
            f"KVFERRY_ROUTER_TOKEN. A router that was started without one must be {_WITH_TOKEN}"
        )
    address, trusted = base_url(at) + PATH, trusting(ca)
    try:
        answer = httpx.request(
            method,
            address,
            params=None if url is None else {"url": url},
            json=body,
            headers={"authorization": f"Bearer {token}"},
            timeout=_ANSWER_SECONDS,
            trust_env=False,
            verify=trusted,
        )
    except (httpx.HTTPError, ValueError) as error:
        raise KvferryError(f"the router at {at} gave no answer: {error}") from None
    try:
        said = answer.json()
    except ValueError:
        said = None
    if answer.is_success and isinstance(said, dict) and said.keys() & {"engines", "url"}:
        return said
    refusal = said.get("error") if isinstance(said, dict) else None
    if not isinstance(refusal, dict):
        raise KvferryError(
            f"{at} answered with status {answer.status_code}, but not as a kvferry router does; "
            "is the address right? Name the router's with --router"
        )
    if answer.status_code == 404 and refusal.get("code") == "not_found":
        raise KvferryError(
            f"the router at {at} was started without a token, so it has no admin API; it must be "
            f"{_WITH_TOKEN}"
        )
    if answer.status_code == 401:
        raise KvferryError(
            f"the router at {at} does not know this token; use the one that it was started with "
            "(--token-file, or KVFERRY_ROUTER_TOKEN)"
        )
    raise KvferryError(str(refusal.get("message")))
