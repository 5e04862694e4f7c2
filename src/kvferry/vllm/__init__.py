"""kvferry's connector for an unmodified vLLM.

    --kv-transfer-config '{"kv_connector": "FerryConnector", "kv_role": "kv_both",
                           "kv_connector_module_path": "kvferry.vllm"}'

vLLM resolves the class also in its API process, so importing this touches no device and starts
nothing.
"""

import logging

from kvferry.vllm.combined import FerryConnector
from kvferry.vllm.pool_connector import FerryMooncakeStoreConnector, FerryPoolConnector

MooncakeStoreConnector = FerryMooncakeStoreConnector  # the name that configurations use


def _log_with_vllm() -> None:
    """Our messages go where vLLM's go, at the level that was set for vLLM."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvferry")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


_log_with_vllm()

__all__ = [
    "FerryConnector",
    "FerryMooncakeStoreConnector",
    "FerryPoolConnector",
    "MooncakeStoreConnector",
]
