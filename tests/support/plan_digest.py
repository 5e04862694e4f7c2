"""The digest of a plan."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from kvferry.plan import EdgePlan


def digest(plan: EdgePlan) -> str:
    """Two plans are equal exactly if their digests are."""
    values = asdict(plan)
    for piece in values["pieces"]:
        del piece["_templates"]  # made as requests need them
    text = json.dumps(values, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else msgspec.structs.asdict(value)
