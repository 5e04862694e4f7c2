"""An engine's directory: tells consumers who its ranks are; runs beside the scheduler.

A consumer says `hello` once per incarnation and is told all ranks, or refused with the reason:
another version, another model, bytes that mean something else. What the consumer would refuse is
refused here too, so that both logs say it. A doctor may `look` without being judged.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict

import msgspec

from kvferry.errors import KvferryError
from kvferry.layout.model import require_same_cache
from kvferry.p2p.describe import read_model, read_shape, require_plannable, require_same_meaning
from kvferry.p2p.server import Packed, Server, pack
from kvferry.plan.assign import assign
from kvferry.wire.messages import (
    VERSION,
    EngineInfo,
    Hello,
    Look,
    RankInfo,
    Refused,
    ReplyBody,
    Request,
    Seen,
    SeenRank,
    Welcome,
    refusal,
)
from kvferry.wire.sockets import Sockets

MOST_JUDGED = 256  # verdicts about consumers that the directory remembers
# What a connection may have of this thread for judging, in a minute. An engine is judged once, in
# some milliseconds; one that describes itself anew all the time is told to ask again.
JUDGING_SECONDS = 1.0
JUDGING_PERIOD_SECONDS = 60.0


def refuse_version(version: int) -> Refused | None:
    if version == VERSION:
        return None
    return Refused(
        "version",
        f"the peer speaks version {version}, this engine {VERSION}; run the same kvferry on both",
    )


class Directory(Server):
    """Tells consumers who the engine's ranks are; runs beside the scheduler."""

    def __init__(
        self,
        sockets: Sockets,
        engine: EngineInfo | None = None,
        *,
        host: str | None = None,
        port: int = 0,
    ) -> None:
        super().__init__(sockets, host, port, "kvferry-directory")
        self.engine = engine  # None: not described yet; callers ask again
        self._ranks: list[RankInfo] = []
        self._welcome: Packed | None = None
        self._judged: OrderedDict[bytes, Refused | None] = OrderedDict()
        self._judging: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # since when, spent

    def set_ranks(self, ranks: list[RankInfo]) -> None:
        """All workers' own descriptions, of all stages."""

        def work() -> None:
            self._ranks, self._welcome = list(ranks), None

        self.submit(work)

    def set_engine(self, engine: EngineInfo, ranks: list[RankInfo]) -> None:
        """Who the engine is, from now on: its first description, or a new incarnation."""

        def work() -> None:
            self.engine, self._ranks, self._welcome = engine, list(ranks), None
            self._judged.clear()

        self.submit(work)

    def answer(self, sender: bytes, request: Request) -> ReplyBody | Packed | None:
        body = request.body
        if not isinstance(body, Hello | Look):
            return Refused("malformed", "this is the directory; it answers only a hello")
        refused = refuse_version(body.version)
        if refused is None and self.engine is None:
            refused = Refused("busy", "this engine has not described itself yet; ask again")
        if refused is None and isinstance(body, Hello):
            refused = self._verdict(sender, body.engine)
        if refused is not None or self.engine is None:
            return refused
        if isinstance(body, Look):
            return self._seen(self.engine)
        if self._welcome is None:
            self._welcome = pack(Welcome(self.engine, self._ranks))
        return self._welcome

    def _seen(self, us: EngineInfo) -> Seen:
        ranks = [SeenRank(r.pp_rank, r.tp_rank, r.address, r.carriers) for r in self._ranks]
        return Seen(us.engine_id, us.incarnation, us.model, us.shape, ranks)

    def _verdict(self, sender: bytes, consumer: EngineInfo) -> Refused | None:
        """Judge a description once; all ranks of an engine send the same."""
        key = hashlib.sha256(msgspec.msgpack.encode(consumer)).digest()
        if key not in self._judged:
            begun = time.monotonic()
            since, spent = self._judging.get(sender, (begun, 0.0))
            if since + JUDGING_PERIOD_SECONDS <= begun:
                since, spent = begun, 0.0
            if spent > JUDGING_SECONDS:
                return Refused("busy", "this peer describes itself too often; ask again later")
            verdict = self._judged[key] = self._judge(consumer)
            if verdict is not None:
                who = f"{consumer.engine_id:.80}"
                self.complain(who, "engine %r is refused: %.2000s", who, verdict.message)
            self._judging[sender] = since, spent + time.monotonic() - begun
            for memory in (self._judged, self._judging):
                while len(memory) > MOST_JUDGED:
                    memory.popitem(last=False)
        self._judged.move_to_end(key)
        return self._judged[key]

    def _judge(self, consumer: EngineInfo) -> Refused | None:
        """Refuse here what the consumer would refuse, so that both logs say it."""
        assert self.engine is not None
        try:
            require_same_meaning(self.engine, consumer)
            ours, theirs = read_model(self.engine), read_model(consumer)
            require_same_cache(ours, theirs, frozenset({"draft"}))
            shapes = read_shape(self.engine), read_shape(consumer)
            require_plannable(ours, *shapes)
            assign(ours, *shapes)
        except KvferryError as error:
            return refusal("model", error)
        return None
