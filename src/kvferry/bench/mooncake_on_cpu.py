"""vLLM's own MooncakeConnector on machines without an accelerator, for side-by-side runs.

It asks for the current accelerator's index and dies where there is none; here it is told 0. Nothing
else is changed.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnector,
)


class MooncakeOnCpu(MooncakeConnector):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        torch.accelerator.current_device_index = lambda: 0
        super().__init__(*args, **kwargs)
