"""An engine's directory: tells consumers who its ranks are; runs beside the scheduler.

A consumer says `hello` once per incarnation and is told all ranks, or refused with the reason:
another version, another model, bytes that mean something else. What the consumer would refuse is
refused here too, so that both logs say it. A doctor may `look` without being judged.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict

import msgspec

from kvferry.errors import KvferryError
from kvferry.layout.model import require_same_cache
from kvferry.p2p.describe import read_model, read_shape, require_same_meaning
from kvferry.p2p.server import Server
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
)
from kvferry.wire.sockets import Sockets

MOST_JUDGED = 256  # verdicts about consumers that the directory remembers

log = logging.getLogger("kvferry")


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
        self._judged: OrderedDict[bytes, Refused | None] = OrderedDict()

    def set_ranks(self, ranks: list[RankInfo]) -> None:
        """All workers' own descriptions, of all stages."""
        self.submit(lambda: setattr(self, "_ranks", list(ranks)))

    def set_engine(self, engine: EngineInfo, ranks: list[RankInfo]) -> None:
        """Who the engine is, from now on: its first description, or a new incarnation."""

        def work() -> None:
            self.engine, self._ranks = engine, list(ranks)
            self._judged.clear()

        self.submit(work)

    def answer(self, sender: bytes, request: Request) -> ReplyBody | None:
        body = request.body
        if not isinstance(body, Hello | Look):
            return Refused("malformed", "this is the directory; it answers only a hello")
        refused = refuse_version(body.version)
        if refused is None and self.engine is None:
            refused = Refused("busy", "this engine has not described itself yet; ask again")
        if refused is None and isinstance(body, Hello):
            refused = self._verdict(body.engine)
        if refused is not None or self.engine is None:
            return refused
        if isinstance(body, Look):
            return self._seen(self.engine)
        return Welcome(self.engine, self._ranks)

    def _seen(self, us: EngineInfo) -> Seen:
        ranks = [SeenRank(r.pp_rank, r.tp_rank, r.address, r.carriers) for r in self._ranks]
        return Seen(us.engine_id, us.incarnation, us.model, us.shape, ranks)

    def _verdict(self, consumer: EngineInfo) -> Refused | None:
        """Judge a description once; all ranks of an engine send the same."""
        key = hashlib.sha256(msgspec.msgpack.encode(consumer)).digest()
        if key not in self._judged:
            self._judged[key] = self._judge(consumer)
            if self._judged[key] is not None:
                log.warning("engine %.80r is refused: %s", consumer.engine_id, self._judged[key])
            while len(self._judged) > MOST_JUDGED:
                self._judged.popitem(last=False)
        return self._judged[key]

    def _judge(self, consumer: EngineInfo) -> Refused | None:
        """Refuse here what the consumer would refuse, so that both logs say it."""
        assert self.engine is not None
        try:
            require_same_meaning(self.engine, consumer)
            ours, theirs = read_model(self.engine), read_model(consumer)
            require_same_cache(ours, theirs, frozenset({"draft"}))
            assign(ours, read_shape(self.engine), read_shape(consumer))
        except KvferryError as error:
            return Refused("model", str(error))
        return None
