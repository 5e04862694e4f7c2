# SPDX-License-Identifier: Apache-2.0
"""Messages between the scheduler and the workers of one engine, which vLLM carries in every step.

The scheduler sends one `FerryMetadata` with every step, the same for all workers. Each worker may
answer with a `FerryReport`; vLLM adds up the reports of all workers. Orders have a `handover` and a
`pool` half. A half is None where the connector does not have it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.handover.holds import HoldOrder
from kvferry.handover.load import Load
from kvferry.handover.ticket import Ticket
from kvferry.pool.orders import PoolLoaded, Saved
from kvferry.pool.scheduler import PoolOrders

ENDS = ("delivered", "withdrawn", "expired", "failed")  # of holds, from good to bad


@dataclass
class HandoverOrders:
    holds: list[HoldOrder] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    releases: list[Ticket] = field(default_factory=list)
    withdrawals: list[str] = field(default_factory=list)  # holds that will not come, or must go
    written: int = 0  # the last step that may write into the blocks of `holds`
    incarnation: str = ""  # not empty: workers take this incarnation before all else

    @property
    def pending(self) -> bool:
        """Whether workers must get these orders, even in a step that computes nothing."""
        return any(vars(self).values())

    def take(self) -> HandoverOrders:
        taken = HandoverOrders(**vars(self))
        vars(self).update(vars(HandoverOrders()))
        return taken


@dataclass
class FerryMetadata(KVConnectorMetadata):  # type: ignore[misc]
    handover: HandoverOrders | None = None
    pool: PoolOrders | None = None
    idle: bool = False  # the step computes nothing
    queueing: bool = False  # requests wait for a prefill elsewhere, or for blocks
    step: int = 0  # the step's number; 0 without a hand-over


@dataclass
class FerryHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker's description, for the directory."""

    engine: bytes  # msgpack of EngineInfo
    rank: bytes  # msgpack of RankInfo
    flat: bool = True  # whether no other child of a MultiConnector answers in responses too
    second: bool = False  # whether another child sees requests first


@dataclass
class FerryReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What ended since the last step, on one worker or, aggregated, on all."""

    handshakes: list[FerryHandshake] = field(default_factory=list)  # under a MultiConnector, once
    closed: dict[str, str] = field(default_factory=dict)  # how holds ended, by request
    saved: list[Saved] = field(default_factory=list)
    loaded: list[PoolLoaded] = field(default_factory=list)  # from the pool
    recovered: list[str] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> FerryReport:
        assert isinstance(other, FerryReport)
        closed = dict(self.closed)
        for request_id, why in other.closed.items():
            closed[request_id] = worse(why, closed.get(request_id))
        return FerryReport(
            self.handshakes + other.handshakes,
            closed,
            self.saved + other.saved,
            self.loaded + other.loaded,
            self.recovered + other.recovered,
        )


def worse(one: str, other: str | None) -> str:
    """The worse of two ranks' ends of one hold."""
    return one if other is None else max(one, other, key=ENDS.index)
