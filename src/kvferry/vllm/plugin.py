# SPDX-License-Identifier: Apache-2.0
"""A `vllm.general_plugins` entry point: registers our classes and our logger in all vLLM processes.

MultiConnector rebuilds its children's statistics through vLLM's registry of connectors, by class
name. With the entry point, `kv_connector: FerryConnector` needs no module path either.

vLLM loads plugins before it configures logging, in a server and in `LLM(...)`, and may configure it
again later. So our logger becomes a child of vLLM's, and has no handlers of its own.

vLLM makes connectors after it has loaded the weights. It asks its factory for the class much
earlier, when it makes its configuration; there the plugin checks our settings (`check_early`).
"""

from __future__ import annotations

import logging
from typing import Any

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
    check_early(KVConnectorFactory)
    log_with_vllm()


def check_early(factory: Any) -> None:
    """Let the factory refuse our connectors' settings when it is asked for their class."""
    ask = factory.get_connector_class.__func__
    if getattr(ask, "checks_kvferry", False):
        return

    def get_connector_class(cls: Any, kv_transfer_config: Any) -> Any:
        found = ask(cls, kv_transfer_config)
        if found.__module__ == "kvferry.vllm.connector":
            from kvferry.vllm.check import require_settings

            extra = kv_transfer_config.kv_connector_extra_config or {}
            require_settings(found.STYLE, found.POOL_DEFAULTS, extra)
        return found

    get_connector_class.checks_kvferry = True  # type: ignore[attr-defined]
    factory.get_connector_class = classmethod(get_connector_class)


def log_with_vllm() -> None:
    """Log where vLLM logs and at vLLM's level, unless the application has configured our logger."""
    ours = logging.getLogger("kvferry")
    if not ours.handlers:
        ours.parent = logging.getLogger("vllm")  # its handlers are looked up with every line
