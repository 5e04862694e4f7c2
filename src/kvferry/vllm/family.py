"""Whether a connector is alone or a child of vLLM's MultiConnector, and who its siblings are.

A MultiConnector hands on only its first child's handshake metadata, and raises if two children put
the same key into a response. vLLM tells a child nothing of either; so a child looks who called its
constructor. What follows from it:

- a child brings its workers' descriptions to the scheduler by worker metadata, which MultiConnector
  keeps apart for each child, and leaves the handshake metadata to in-tree siblings;
- beside a connector that speaks in responses too, the ticket is one key, `kvferry`, and no other;
- of several children of ours exactly one takes a request: those by transfer id go to the one in
  Mooncake style, others to the first of another style;
- children see a new request one after another, and some in-tree ones shorten its prompt: where it
  matters, ours must come before them (`prefill`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.vllm.config import Style

MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
FRAMES = 5  # between MultiConnector's constructor and this module, at most
# Connectors that put nothing into responses.
SILENT = """
FerryMooncakeStoreConnector FerryPoolConnector
DecodeBenchConnector ExampleConnector FlexKVConnectorV1 HF3FSKVConnector MooncakeConnector
MooncakeStoreConnector OffloadingConnector SimpleCPUOffloadConnector
"""
# Connectors that shorten a prompt which is to be handed over, if none has done so before: NIXL's by
# as many tokens as we do, for states and for drafters that read ahead; others by one, for states.
CUTTING_ALIKE = ("NixlPullConnector", "NixlPushConnector")
CUTTING_ONE = ("MooncakeConnector", "MoRIIOConnector")
CUTTING = CUTTING_ALIKE + CUTTING_ONE


@dataclass(frozen=True, slots=True)
class Family:
    """Siblings under a MultiConnector; alone, a family of one."""

    index: int = 0  # of this child, among those of ours
    styles: tuple[Style, ...] = ()  # of all children of ours; empty: alone
    others: tuple[str, ...] = ()  # names of children that are not
    ahead: tuple[str, ...] = ()  # those of the others that see a request before this child does

    @property
    def alone(self) -> bool:
        return not self.styles

    @property
    def flat(self) -> bool:
        """Whether a ticket may use the names that in-tree connectors use."""
        return all(name in SILENT.split() for name in self.others)

    def takes(self, params: Mapping[str, Any]) -> bool:
        """Whether a request is this child's to answer."""
        if len(self.styles) < 2:
            return True
        by_id = bool(params.get("transfer_id"))
        fitting = [i for i, style in enumerate(self.styles) if (style == "mooncake") == by_id]
        return self.index == (fitting[0] if fitting else 0)


def family_of(connector: Any, base: type) -> Family:
    """The siblings of a connector under construction; `base` is the class of all of ours."""
    parent = parent_of(connector)
    if parent is None:
        return Family()
    classes = [cls for cls, _ in parent._get_connector_classes_and_configs(parent._vllm_config)]
    before = classes[: len(parent.sub_connectors)]
    return Family(
        sum(issubclass(cls, base) for cls in before),
        tuple(cls.STYLE for cls in classes if issubclass(cls, base)),
        tuple(_name(cls) for cls in classes if not issubclass(cls, base)),
        tuple(_name(cls) for cls in before if not issubclass(cls, base)),
    )


def _name(cls: type) -> str:
    """A class's own name, or that of the connector whose subclass it is, where that matters."""
    names = [one.__name__ for one in cls.__mro__]
    return next((name for name in names if name in CUTTING), names[0])


def parent_of(connector: Any) -> Any:
    """The MultiConnector that constructs a connector; None where that is the engine's only one."""
    multi = getattr(sys.modules.get(MULTI), "MultiConnector", None)
    return _caller(connector, multi) if multi is not None else None


def _caller(connector: Any, multi: type) -> Any:
    frame = sys._getframe(2)
    for _ in range(FRAMES):
        owner = frame.f_locals.get("self")
        if owner is not connector and isinstance(owner, multi):
            return owner
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
