# SPDX-License-Identifier: Apache-2.0
"""Connectors of ours as children of vLLM's MultiConnector.

A MultiConnector passes on only its first child's handshake metadata, and raises if two children put
the same key into a response. vLLM tells a child nothing about its siblings. So kvferry finds out:

- Children of ours know each other (`Family`): vLLM gives all children of one MultiConnector the
  same description of the cache. Exactly one child of ours takes a request: a request with a
  transfer id goes to the child in Mooncake style, any other to the first child of another style.
- A worker reads the names of all children in the engine's configuration (`Siblings`), which vLLM
  makes available while it creates a worker's connector. A scheduler cannot see that configuration,
  so its workers report what it needs.
- A worker under a MultiConnector describes itself by worker metadata, which MultiConnector keeps
  apart for each child, and leaves the handshake metadata to in-tree siblings. So a scheduler gets
  handshake metadata of ours only if its connector is alone.
- If a sibling puts keys into responses too, all of the ticket lies under the one key `kvferry`.
- Children see a new request one after another, and some in-tree ones shorten its prompt. Ours does
  not hold a prompt that another child has cut (`Producing.accept`), so it must be listed first.
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
# Connectors that cut one token off a prompt to be handed over, for states, if it is not cut yet.
# NIXL's connectors cut as many tokens as kvferry does, also for drafters that read ahead.
CUTTING_ONE = ("MooncakeConnector", "MoRIIOConnector")


@dataclass(eq=False, slots=True, weakref_slot=True)
class Family:
    """Our connectors in one process of an engine. It lives as long as one of them."""

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
        """Whether this connector takes a request with these parameters."""
        if len(self.styles) < 2:
            return True
        by_id = bool(params.get("transfer_id"))
        fitting = [i for i, style in enumerate(self.styles) if (style == "mooncake") == by_id]
        return index == (fitting[0] if fitting else 0)


_families: WeakValueDictionary[tuple[Any, int], Family] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Siblings:
    """Those children of a worker's MultiConnector that are not hand-over connectors of ours."""

    others: tuple[str, ...] = ()
    ahead: bool = False  # whether one of the others sees a request before this child does

    @classmethod
    def of(cls, index: int) -> Siblings | None:
        """The siblings of the connector with this number in its `Family`; None: it is alone."""
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
    """The engine's transfer configuration, if it is a MultiConnector's; else None. Only a worker
    sees it, while vLLM creates the worker's connector."""
    engine = get_current_vllm_config_or_none()
    transfer = engine.kv_transfer_config if engine is not None else None
    if transfer is None:
        return None
    kind = KVConnectorFactory.get_connector_class(transfer)
    return transfer if issubclass(kind, MultiConnector) else None


def _children(transfer: Any) -> list[type]:
    """The classes of a MultiConnector's children, in order. A MultiConnector among them is replaced
    by its own children."""
    classes: list[type] = []
    for fields in transfer.kv_connector_extra_config["connectors"]:
        child = KVTransferConfig(**fields)
        kind = KVConnectorFactory.get_connector_class(child)
        classes += _children(child) if issubclass(kind, MultiConnector) else [kind]
    return classes


def _style(cls: type) -> Style | None:
    """The hand-over style of a connector; None: it has no hand-over, or is not ours."""
    style: Style | None = getattr(cls, "STYLE", None)
    return style


def _name(cls: type) -> str:
    """The name of a class, or of its base class in `CUTTING_ONE`."""
    names = [one.__name__ for one in cls.__mro__]
    return next((name for name in names if name in CUTTING_ONE), names[0])
