"""Which versions of others this release is made for; readable where none of them is installed."""

from __future__ import annotations

SUPPORTED_VLLM = ("0.32.",)
