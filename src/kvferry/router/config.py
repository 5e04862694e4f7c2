"""What a router is told: its engines and its limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from kvferry.errors import DescriptionError


@dataclass(frozen=True, slots=True)
class Limits:
    """Every deadline and bound of the router. None can be switched off."""

    tries: int = 3  # engines asked for one request, at most, per stage
    max_connections: int = 2048  # of clients; fewer where the limit of descriptors is low
    max_in_flight: int = 1024  # requests whose body has come; more are answered 429
    max_body_bytes: int = 64 << 20  # of one request; images in chats come inside of the JSON
    max_answer_bytes: int = 64 << 20  # of one answer that is not streamed
    max_held_bytes: int = 1 << 30  # of all these bodies and answers; each byte counts twice
    address_share: float = 0.5  # of connections, places and bytes, for one address; 1: all

    header_seconds: float = 10.0  # for a client to send headers, or to stay idle
    body_seconds: float = 60.0  # for the whole body
    progress_seconds: float = 5.0  # in which at least progress_bytes of a body must come
    progress_bytes: int = 16 << 10
    client_seconds: float = 60.0  # for a client to take 64 KiB of its answer

    connect_seconds: float = 3.0
    prefill_seconds: float = 300.0  # the whole prefill: queueing, computing, answering
    first_byte_seconds: float = 300.0  # streamed answers, until the first byte
    answer_seconds: float = 1800.0  # answers that are not streamed come when all is generated
    chunk_seconds: float = 120.0  # between two chunks of a stream
    drain_seconds: float = 30.0  # for requests in flight when the router is told to stop

    probe_every_seconds: float = 2.0
    probe_seconds: float = 2.0  # for one probe to be answered
    fail_after: int = 2  # failures in a row; one may be a hiccup. A refused connection counts fully
    recover_after: int = 2  # good probes in a row; an engine that flaps stays out

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                value = getattr(self, field.name)
                raise DescriptionError(f"{field.name} must be more than 0, not {value!r}")
        if self.address_share > 1:
            raise DescriptionError(f"address_share must be 1 at most, not {self.address_share!r}")
        largest = 2 * max(self.max_body_bytes, self.max_answer_bytes)
        if largest > self.max_held_bytes * self.address_share:
            raise DescriptionError(
                f"max_held_bytes times address_share must be {largest} at least, twice the largest "
                f"body or answer; it is {self.max_held_bytes * self.address_share:g}"
            )

    @classmethod
    def read(cls, texts: Iterable[str]) -> Limits:
        """Limits written as name=value; the others have their defaults."""
        wanted = {field.name: field.default for field in fields(cls)}
        given: dict[str, float] = {}
        for text in texts:
            name, _, value = text.partition("=")
            if name not in wanted:
                names = ", ".join(wanted)
                raise DescriptionError(f"{name!r} is no limit of the router; there are: {names}")
            whole = isinstance(wanted[name], int)
            try:
                given[name] = int(value) if whole else float(value)
            except ValueError:
                kind = "a whole number" if whole else "a number"
                raise DescriptionError(f"{name} must be {kind}, not {value!r}") from None
        return cls(**given)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Engines by what they do. Without prefill engines, every request is decode-only."""

    prefill: tuple[str, ...]  # base URLs, http://host:port
    decode: tuple[str, ...]
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefill", tuple(base_url(url) for url in self.prefill))
        object.__setattr__(self, "decode", tuple(base_url(url) for url in self.decode))
        if not self.decode:
            raise DescriptionError("a router needs at least one decode engine; none was given")
        urls = self.prefill + self.decode
        for url in urls:
            if urls.count(url) > 1:
                raise DescriptionError(
                    f"the engine {url} is named {urls.count(url)} times; name each engine once, "
                    "either as prefill or as decode (it would hand its cache over to itself)"
                )


def base_url(text: str) -> str:
    """`text` as scheme://host:port[/path]: http where no scheme is given, without a final /v1."""
    url = text.strip() if "://" in text else f"http://{text.strip()}"
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise DescriptionError(f"cannot read the engine's address {text!r}: {error}") from None
    if "@" in parts.netloc:
        # Not repeated in the message: what is before the @ is a secret.
        raise DescriptionError(
            "an engine's address holds a user or a password; leave them out: "
            "clients' Authorization headers are passed on"
        )
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise DescriptionError(f"cannot read the engine's address {text!r}; write http://host:port")
    shown_host = f"[{host}]" if ":" in host else host
    shown_port = "" if port is None else f":{port}"
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{shown_host}{shown_port}{path}"
