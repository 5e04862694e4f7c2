"""What schedulers and workers tell each other, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.p2p.load import Load
from kvferry.p2p.ticket import Ticket

ENDS = ("delivered", "withdrawn", "expired", "failed")  # of holds, from good to bad


@dataclass(frozen=True, slots=True)
class HoldOrder:
    """Open this hold: the request has finished, and its blocks stay."""

    hold_id: str
    request_id: str
    digest: str
    tokens: int
    tables: tuple[tuple[int, ...], ...]


@dataclass
class FerryMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders, the same for all workers."""

    holds: list[HoldOrder] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    releases: list[Ticket] = field(default_factory=list)
    withdrawals: list[str] = field(default_factory=list)  # holds that will not come, or must go
    incarnation: str = ""  # not empty: be another one from now on, before all else
    idle: bool = False  # the step computes nothing

    @property
    def pending(self) -> bool:
        """Whether workers should hear of it, also where there is nothing to compute."""
        return bool(
            self.holds
            or self.loads
            or self.cancels
            or self.releases
            or self.withdrawals
            or self.incarnation
        )


@dataclass
class FerryHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker's description, for the directory."""

    engine: bytes  # msgpack of EngineInfo
    rank: bytes  # msgpack of RankInfo
    flat: bool = True  # whether no other child of a MultiConnector answers in responses too
    second: bool = False  # whether another child sees requests first


@dataclass
class FerryWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What workers tell with a step: how holds ended, by request; under a MultiConnector, with
    their first one, what they are."""

    handshakes: list[FerryHandshake]
    closed: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> FerryWorkerMetadata:
        assert isinstance(other, FerryWorkerMetadata)
        closed = dict(self.closed)
        for request_id, why in other.closed.items():
            closed[request_id] = worse(why, closed.get(request_id))
        return FerryWorkerMetadata(self.handshakes + other.handshakes, closed)


def worse(one: str, other: str | None) -> str:
    """Of two ends of one hold, on two ranks."""
    return one if other is None else max(one, other, key=ENDS.index)
