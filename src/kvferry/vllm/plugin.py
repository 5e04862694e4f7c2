"""A `vllm.general_plugins` entry point: our classes and our log lines, in every process of vLLM.

MultiConnector rebuilds its children's statistics through vLLM's registry of connectors, by class
name. With the entry point, `kv_connector: FerryConnector` needs no module path either.

vLLM loads plugins before it configures logging, in a server and in `LLM(...)`, and may configure it
again later. So our logger looks for vLLM's handlers each time that it has a line, and not before.
"""

from __future__ import annotations

import logging

NAMES = (
    "FerryConnector",
    "FerryMooncakeConnector",
    "FerryMooncakeStoreConnector",
    "FerryNixlConnector",
    "FerryNixlPushConnector",
    "FerryPoolConnector",
)


def register() -> None:
    """May be called more than once; touches no device and imports no connector."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in NAMES:
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, "kvferry.vllm", name)
    log_with_vllm()


def log_with_vllm() -> None:
    """Log where vLLM logs and at vLLM's level, unless the application has configured our logger."""
    ours = logging.getLogger("kvferry")
    if ours.handlers:
        return
    # The level comes from the parent. `logging` chooses the parent of a name without dots once.
    ours.parent = logging.getLogger("vllm")
    ours.propagate = False
    ours.addHandler(VllmHandlers())


class VllmHandlers(logging.Handler):
    """Passes a line to the handlers of vLLM's logger; without any, to the root logger's.

    An application may give our logger a handler later. That handler then has the line to itself.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger("kvferry").handlers == [self]:
            logging.getLogger("vllm").callHandlers(record)
