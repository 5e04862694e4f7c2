# SPDX-License-Identifier: Apache-2.0
"""Connectors of ours as children of vLLM's MultiConnector.

A MultiConnector hands on only its first child's handshake metadata, and raises if two children put
the same key into a response. vLLM tells a child nothing of its siblings. So kvferry finds out:

- Children of ours know each other (`Family`): vLLM gives all children of one MultiConnector the
  same description of the cache. Exactly one child of ours takes a request: a request with a
  transfer id goes to the child in Mooncake style, any other to the first child of another style.
- A worker reads the names of all children in the engine's configuration (`Siblings`), which vLLM
  makes available while it creates a worker's connector. A scheduler cannot see that configuration.
  It hears from its workers what it must know.
- A worker under a MultiConnector describes itself by worker metadata, which MultiConnector keeps
  apart for each child, and leaves the handshake metadata to in-tree siblings. So handshake metadata
  of ours reaches a scheduler only where its connector is alone.
- Beside a connector that speaks in responses too, the ticket is one key, `kvferry`, and no other.
- Children see a new request one after another, and some in-tree ones shorten its prompt. Ours does
  not hold what another has cut (`Producing.accept`): it must come before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from vllm.config import KVTransferConfig, get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvferry.vllm.config import Style

# Connectors that put nothing into responses.
SILENT = """
FerryMooncakeStoreConnector FerryPoolConnector
DecodeBenchConnector ExampleConnector FlexKVConnectorV1 HF3FSKVConnector MooncakeConnector
MooncakeStoreConnector OffloadingConnector SimpleCPUOffloadConnector
"""
# Connectors that shorten a prompt which is to be handed over, if none has done so before, by one
# token, for states. NIXL's do so by as many tokens as we do, also for drafters that read ahead.
CUTTING_ONE = ("MooncakeConnector", "MoRIIOConnector")


@dataclass(eq=False, slots=True, weakref_slot=True)
class Family:
    """The connectors of ours in one engine, all of one role. It lives as long as one of them."""

    cache: Any = None  # kept, so that its id is not used again while the family lives
    styles: list[Style] = field(default_factory=list)  # of its connectors, in order

    @classmethod
    def of(cls, role: Any, kv_cache_config: Any) -> Family:
        return _families.setdefault((role, id(kv_cache_config)), cls(kv_cache_config))

    def join(self, style: Style) -> int:
        """The number of a new connector."""
        self.styles.append(style)
        return len(self.styles) - 1

    def takes(self, index: int, params: Mapping[str, Any]) -> bool:
        """Whether a request is this connector's to answer."""
        if len(self.styles) < 2:
            return True
        by_id = bool(params.get("transfer_id"))
        fitting = [i for i, style in enumerate(self.styles) if (style == "mooncake") == by_id]
        return index == (fitting[0] if fitting else 0)


_families: WeakValueDictionary[tuple[Any, int], Family] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Siblings:
    """The children of a worker's MultiConnector that hand over, if at all, by other means."""

    others: tuple[str, ...] = ()
    ahead: bool = False  # whether one of the others sees a request before this child does

    @classmethod
    def of(cls, index: int) -> Siblings | None:
        """Of the connector with this number of those in a `Family`; None: it is alone."""
        transfer = multiconnector()
        if transfer is None:
            return None
        classes = _children(transfer)
        me = [i for i, kind in enumerate(classes) if _style(kind) is not None][index]
        return cls(
            tuple(_name(kind) for kind in classes if _style(kind) is None),
            any(_style(kind) is None for kind in classes[:me]),
        )

    @property
    def flat(self) -> bool:
        """Whether a ticket may use the names that in-tree connectors use."""
        return all(name in SILENT.split() for name in self.others)


def multiconnector() -> Any:
    """The transfer configuration of the engine whose worker creates its connector now, if that is
    a MultiConnector's; else None."""
    engine = get_current_vllm_config_or_none()
    transfer = engine.kv_transfer_config if engine is not None else None
    if transfer is None:
        return None
    kind = KVConnectorFactory.get_connector_class(transfer)
    return transfer if issubclass(kind, MultiConnector) else None


def _children(transfer: Any) -> list[type]:
    """The classes of a MultiConnector's children, in order; those of a MultiConnector among them in
    its place."""
    classes: list[type] = []
    for fields in transfer.kv_connector_extra_config["connectors"]:
        child = KVTransferConfig(**fields)
        kind = KVConnectorFactory.get_connector_class(child)
        classes += _children(child) if issubclass(kind, MultiConnector) else [kind]
    return classes


def _style(cls: type) -> Style | None:
    """How a connector of ours hands over; None: it does not, or is not ours."""
    style: Style | None = getattr(cls, "STYLE", None)
    return style


def _name(cls: type) -> str:
    """A class's own name, or that of the connector whose subclass it is, where that matters."""
    names = [one.__name__ for one in cls.__mro__]
    return next((name for name in names if name in CUTTING_ONE), names[0])
