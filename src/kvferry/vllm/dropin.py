"""Stand-ins for vLLM's own connectors: their roles, keys, variables and request parameters.

    {"kv_connector": "MooncakeConnector", "kv_connector_module_path": "kvferry.vllm", …}

The classes have names of their own, and `kvferry.vllm` calls them by the in-tree ones too: vLLM
takes special measures for connectors *named* like its own, which are not for ours.
"""

from __future__ import annotations

from typing import ClassVar

from kvferry.vllm.config import Style
from kvferry.vllm.connector import HandoverConnector


class FerryNixlConnector(HandoverConnector):
    """For NixlConnector: prefill first, and its answer is passed on to the decode engine."""

    STYLE: ClassVar[Style] = "nixl"


class FerryNixlPushConnector(HandoverConnector):
    """For NixlPushConnector: as above, or both engines know each other by the request's id."""

    STYLE: ClassVar[Style] = "push"


class FerryMooncakeConnector(HandoverConnector):
    """For MooncakeConnector: both engines get the request at once, with one transfer id."""

    STYLE: ClassVar[Style] = "mooncake"
