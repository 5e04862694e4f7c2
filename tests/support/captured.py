"""Engines whose memory lies as real vLLM registered it, handing over as processes.

Storages, strides and formulas for the inside of pages come from the fixtures (`golden`); a
producer's blocks are filled, and a consumer's checked, through these alone. Layouts, the handshake,
plans and carriers are the product's.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from golden import Golden, golden, ordinal
from kvferry.carriers import make_carrier
from kvferry.carriers.base import MemoryRegion
from kvferry.carriers.host import HostMemory
from kvferry.handover.consumer import ConsumerRank
from kvferry.handover.describe import engine_info, rank_info
from kvferry.handover.holds import HoldOrder
from kvferry.handover.load import Load, Loaded
from kvferry.handover.producer import Directory, ProducerRank
from kvferry.handover.ticket import Ticket
from kvferry.layout.shape import Rank
from kvferry.net.rpc import Sockets

LOOPBACK = "127.0.0.1"
CANARY, POISON = 0xEE, 0x5A
PATIENCE_SECONDS = 30.0
Tables = list[list[int]]


@dataclass(frozen=True)
class Captured:
    """A captured engine, its interior borrowed where only its geometry was captured."""

    name: str
    carrier: str = "local"
    interior_of: str = ""

    @property
    def engine(self) -> Golden:
        found = golden(self.name)
        if not self.interior_of:
            return found
        like = golden(self.interior_of)
        ranks = [
            {**r, "backends": r["backends"] or like.data["ranks"][0]["backends"]}
            for r in found.data["ranks"]
        ]
        return Golden({**found.data, "interior": like.data["interior"], "ranks": ranks})

    def tables(self, tokens: int, seed: int) -> Tables:
        """Distinct blocks for each of vLLM's groups; windows have dropped their first ones."""
        captured = self.engine.data["ranks"][0]
        rng = np.random.default_rng(seed)
        ids = rng.permutation(np.arange(1, captured["num_blocks"])).tolist()
        tables = []
        for group in captured["groups"]:
            spec = group["spec"]
            if spec["type"] == "MambaSpec":
                tables.append([ids.pop()])
                continue
            dropped = first_needed(spec, tokens) // spec["block_size"]
            count = -(-tokens // spec["block_size"])
            tables.append([0] * dropped + [ids.pop() for _ in range(count - dropped)])
        return tables


def first_needed(spec: dict[str, Any], tokens: int) -> int:
    window = spec.get("sliding_window")
    return max(0, tokens - window + 1) if window else 0


class Rack:
    """One rank's storages."""

    def __init__(self, captured: Captured, rank: Rank, fill: int) -> None:
        self.captured, self.rank = captured, rank
        self.engine = captured.engine
        self.layout = self.engine.layout(rank)
        self.memory = [
            np.frombuffer(mmap.mmap(-1, s["bytes"]), dtype=np.uint8)
            for s in self.engine.rank(rank)["storages"]
        ]
        for storage in self.memory:
            storage[:] = fill
        self.bases = [storage.ctypes.data for storage in self.memory]
        self.regions = [
            MemoryRegion(base, len(storage))
            for base, storage in zip(self.bases, self.memory, strict=True)
        ]
        self.carrier = make_carrier(captured.carrier, secret=None, host=LOOPBACK)
        self.carrier.register(self.regions)

    def fill(self, tables: Tables, tokens: int) -> None:
        for storage, where, values, held in self._bytes(tables, tokens):
            self.memory[storage][where[held]] = values[held]

    def wrong_bytes(self, tables: Tables, tokens: int) -> int:
        """Bytes of loaded blocks that are not right, and of all others that are not untouched."""
        expected = [np.full(len(storage), CANARY, dtype=np.uint8) for storage in self.memory]
        cared = [np.ones(len(storage), dtype=bool) for storage in self.memory]
        for storage, start, stop in self._pages(tables):
            cared[storage][start:stop] = False  # padding may be written
        for storage, where, values, held in self._bytes(tables, tokens):
            cared[storage][where] = True
            expected[storage][where] = np.where(held, values, 0)  # the tail is zeroed
        return sum(
            int(np.count_nonzero((found != right) & care))
            for found, right, care in zip(self.memory, expected, cared, strict=True)
        )

    def _layers(self) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
        captured = self.engine.rank(self.rank)
        for group in captured["groups"]:
            for layer in group["layers"]:
                yield group, layer, captured["tensors"][layer]

    def _pages(self, tables: Tables) -> Iterator[tuple[int, int, int]]:
        for group, _, tensor in self._layers():
            size, ratio = tensor["element_size"], self._split(group, tensor)
            step = tensor["strides"][0] * size * ratio
            for block in filter(None, tables[group["group_id"]]):
                start = tensor["storage_offset_bytes"] + block * step
                yield tensor["storage"], start, start + step

    def _split(self, group: dict[str, Any], tensor: dict[str, Any]) -> int:
        """Kernel blocks in a block."""
        state = group["spec"]["type"] == "MambaSpec"
        return 1 if state else group["spec"]["block_size"] // tensor["shape"][2]

    def _bytes(self, tables: Tables, tokens: int) -> Iterator[tuple[int, Any, Any, Any]]:
        """Storage, offsets, values of all bytes of a request's blocks, and which hold something."""
        for group, layer, tensor in self._layers():
            table = tables[group["group_id"]]
            parts = (
                self._state_bytes(layer, table[0])
                if group["spec"]["type"] == "MambaSpec"
                else self._token_bytes(group["spec"], layer, table, tokens)
            )
            for where, values, held in parts:
                yield tensor["storage"], where, values, held

    def _token_bytes(
        self, spec: dict[str, Any], layer: str, table: list[int], tokens: int
    ) -> Iterator[tuple[Any, Any, Any]]:
        latent = "MLA" in spec["type"]
        size = self.engine.rank(self.rank)["tensors"][layer]["element_size"]
        for number, component in enumerate(("latent",) if latent else ("k", "v")):
            for index, block in enumerate(table):
                if not block:
                    continue
                at = self.engine.element_offsets(self.rank, layer, component, block)
                heads, slots, dims = at.shape
                first = 0 if latent else self._first_head(layer)
                position = self._positions(index, slots)
                key = (
                    ordinal(layer) * 7919
                    + (number + 2 * (".indexer." in layer)) * 104729
                    + (first + np.arange(heads))[:, None, None] * 1299709
                    + position[None, :, None] * 15485863
                    + np.arange(dims)[None, None, :] * 32452843
                )
                held = np.broadcast_to((position < tokens)[None, :, None], at.shape)
                for byte in range(size):
                    yield at + byte, _value(key, byte), held

    def _positions(self, index: int, slots: int) -> Any:
        """The tokens that the slots of a request's block hold."""
        return index * slots + np.arange(slots)

    def _first_head(self, layer: str) -> int:
        heads: int = self.engine.data["hf_config"]["num_key_value_heads"]
        return self.rank.tp * heads // int(self.engine.engine["tp"])

    def _state_bytes(self, layer: str, block: int) -> Iterator[tuple[Any, Any, Any]]:
        conv, ssm = self.engine.rank(self.rank)["state_views"][layer]
        rows_first = conv["conv_order"] == "rows_first"
        config = self.engine.data["hf_config"]
        for section in conv["conv_sections"]:
            shared = config.get("mamba_n_groups") == 1 and section["name"] in ("B", "C")
            first = 0 if shared else self.rank.tp * section["channels"]
            channel = np.arange(section["channels"])[:, None]
            row = np.arange(conv["shape"][1 if rows_first else 2])[None, :]
            c, r = (conv["strides"][a] for a in ((2, 1) if rows_first else (1, 2)))
            at = block * conv["strides"][0] + (section["start_channel"] + channel) * c + row * r
            key = ordinal(layer) * 7919 + ord(section["name"]) * 104729
            key = key + (first + channel) * 1299709 + row * 15485863
            yield from _elements(conv, at, key)
        heads, *inner = ssm["shape"][1:]
        head = np.arange(heads)[:, None]
        place = np.arange(int(np.prod(inner)))[None, :]  # a head's state is dense
        at = block * ssm["strides"][0] + head * ssm["strides"][1] + place
        key = ordinal(layer) * 7919 + (self.rank.tp * heads + head) * 1299709 + place * 32452843
        yield from _elements(ssm, at, key)


def _elements(view: dict[str, Any], at: Any, key: Any) -> Iterator[tuple[Any, Any, Any]]:
    start = view["storage_offset_bytes"] + at * view["element_size"]
    for byte in range(view["element_size"]):
        yield start + byte, _value(key, byte), np.ones(at.shape, dtype=bool)


def _value(key: Any, byte: int) -> Any:
    return ((np.asarray(key) * 2654435761 >> (8 + 7 * byte)) & 0xFF).astype(np.uint8)


class CapturedProducer:
    """All ranks of an engine, in this process."""

    rack = Rack

    def __init__(self, captured: Captured) -> None:
        self.captured, engine = captured, captured.engine
        self.sockets = Sockets(None)
        self.racks = [self.rack(captured, rank, POISON) for rank in engine.ranks]
        self.ranks, infos = [], []
        for rack in self.racks:
            server = ProducerRank(self.sockets, "first", lease_seconds=60.0)
            server.start()
            self.ranks.append(server)
            endpoints = {captured.carrier: rack.carrier.endpoint()}
            address = f"{LOOPBACK}:{server.port}"
            infos.append(rank_info(rack.layout, rack.bases, address, "first", endpoints))
        told = engine_info("p", "first", engine.model, engine.shape, {})
        self.directory = Directory(self.sockets, told)
        self.directory.start()
        self.directory.set_engine(told, infos)

    def descriptions(self) -> tuple[int, list[Any]]:
        return self.directory.port, []

    def hold(self, tokens: int) -> Ticket:
        tables = self.captured.tables(tokens, seed=1)
        ticket = Ticket(
            engine_id="p",
            incarnation="first",
            hold_id=f"hold-{tokens}",
            digest=f"digest-{tokens}",
            tokens=tokens,
            host=LOOPBACK,
            port=self.directory.port,
            request_id=f"request-{tokens}",
        )
        for rack, server in zip(self.racks, self.ranks, strict=True):
            rack.fill(tables, tokens)
            server.open_hold(
                HoldOrder(ticket.hold_id, ticket.request_id, ticket.digest, tokens, tables)
            )
        return ticket

    def close(self) -> None:
        for part in (self.directory, *self.ranks, *(rack.carrier for rack in self.racks)):
            part.close()
        self.sockets.close()


class CapturedConsumer:
    """All ranks of an engine, in this process."""

    rack = Rack

    def __init__(self, captured: Captured) -> None:
        self.captured, engine = captured, captured.engine
        self.sockets = Sockets(None)
        told = engine_info("d", "first", engine.model, engine.shape, {})
        self.racks = [self.rack(captured, rank, CANARY) for rank in engine.ranks]
        self.ranks = [
            ConsumerRank(
                self.sockets,
                told,
                engine.model,
                rack.layout,
                rack.bases,
                [rack.carrier],
                zero=HostMemory(rack.regions).zero,
            )
            for rack in self.racks
        ]

    def load(self, ticket: Ticket) -> list[Loaded]:
        tables = tuple(tuple(t) for t in self.captured.tables(ticket.tokens, seed=2))
        for rank in self.ranks:
            rank.start(Load(ticket.request_id, ticket, tables, 0, PATIENCE_SECONDS))
        ended: list[Loaded] = []
        until = time.monotonic() + 2 * PATIENCE_SECONDS
        while len(ended) < len(self.ranks) and time.monotonic() < until:
            ended += [loaded for rank in self.ranks for loaded in rank.take_done()]
            time.sleep(0.002)
        return ended

    def wrong_bytes(self, tokens: int) -> int:
        tables = self.captured.tables(tokens, seed=2)
        return sum(rack.wrong_bytes(tables, tokens) for rack in self.racks)

    def close(self) -> None:
        for part in (*self.ranks, *(rack.carrier for rack in self.racks)):
            part.close()
        self.sockets.close()
