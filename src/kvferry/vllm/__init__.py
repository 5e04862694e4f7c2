# SPDX-License-Identifier: Apache-2.0
"""kvferry's connectors for an unmodified vLLM.

    --kv-transfer-config '{"kv_connector": "FerryConnector", "kv_role": "kv_both",
                           "kv_connector_module_path": "kvferry.vllm"}'

`MooncakeConnector`, `MooncakeStoreConnector`, `NixlConnector`, `NixlPullConnector` and
`NixlPushConnector` under the same module path take the configuration of vLLM's own. vLLM resolves
the class also in its API process, so importing this touches no device and starts nothing.
"""

from kvferry.vllm import plugin
from kvferry.vllm.connector import (
    FerryConnector,
    FerryMooncakeConnector,
    FerryMooncakeStoreConnector,
    FerryNixlConnector,
    FerryNixlPushConnector,
    FerryPoolConnector,
)

MooncakeConnector = FerryMooncakeConnector
NixlConnector = FerryNixlConnector
NixlPullConnector = FerryNixlConnector
NixlPushConnector = FerryNixlPushConnector
MooncakeStoreConnector = FerryMooncakeStoreConnector

plugin.register()  # also where the package's entry points are not installed

__all__ = [
    "FerryConnector",
    "FerryMooncakeConnector",
    "FerryMooncakeStoreConnector",
    "FerryNixlConnector",
    "FerryNixlPushConnector",
    "FerryPoolConnector",
    "MooncakeConnector",
    "MooncakeStoreConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
]
