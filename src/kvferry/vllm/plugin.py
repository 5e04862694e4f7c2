"""A `vllm.general_plugins` entry point: our classes, known to vLLM by name in every process.

MultiConnector rebuilds its children's statistics through vLLM's registry of connectors, by class
name. With the entry point, `kv_connector: FerryConnector` needs no module path either.
"""

from __future__ import annotations

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
