# SPDX-License-Identifier: Apache-2.0
"""kvferry's connectors for an unmodified vLLM.

    --kv-transfer-config '{"kv_connector": "FerryConnector", "kv_role": "kv_both",
                           "kv_connector_module_path": "kvferry.vllm"}'

`MooncakeConnector`, `MooncakeStoreConnector`, `NixlConnector`, `NixlPullConnector` and
`NixlPushConnector` under the same module path take the configuration of vLLM's own. vLLM resolves
the class also in its API process, so importing this touches no device and starts nothing. vLLM is
imported only when a class is asked for: `kvferry check` needs no vLLM.
"""

from __future__ import annotations

from typing import Any

from kvferry.vllm import plugin

STAND_INS = {  # our classes, by the names of vLLM's own
    "MooncakeConnector": "FerryMooncakeConnector",
    "MooncakeStoreConnector": "FerryMooncakeStoreConnector",
    "NixlConnector": "FerryNixlConnector",
    "NixlPullConnector": "FerryNixlConnector",
    "NixlPushConnector": "FerryNixlPushConnector",
}


def __getattr__(name: str) -> Any:
    ours = STAND_INS.get(name, name)
    if ours not in plugin.NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvferry.vllm import connector

    return getattr(connector, ours)


__all__ = [*plugin.NAMES, *STAND_INS]
