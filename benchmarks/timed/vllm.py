# SPDX-License-Identifier: Apache-2.0
"""vLLM's own connectors with their calls timed, for `python -m benchmarks.handover`.

MooncakeConnector asks for the current accelerator's index and dies where there is none; here it is
told 0. Nothing else is changed.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as nixl_connector

from benchmarks.timed import timed


class OnCpu(mooncake_connector.MooncakeConnector):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        torch.accelerator.current_device_index = lambda: 0
        super().__init__(*args, **kwargs)


OnCpu.__name__ = mooncake_connector.MooncakeConnector.__name__  # vLLM looks at names
MooncakeConnector = timed(OnCpu)
NixlConnector = timed(nixl_connector.NixlConnector)
