"""Names of an engine's lives. A new one voids all that was known of those before it.

An engine that starts has a name of its own. Several connectors of ours in one engine (children of
vLLM's MultiConnector) add their number to it, and live side by side; a reset of the caches adds a
random word.
"""

from __future__ import annotations

import re
import secrets

_CHILD = re.compile(r"^(?P<engine>.*)\.(?P<child>\d{1,2})(\.[0-9a-f]{8})?$")


def child(engine: str, index: int) -> str:
    return f"{engine}.{index}"


def after_reset(first: str) -> str:
    """Another one, of an engine or a child whose first is given."""
    return f"{first}.{secrets.token_hex(4)}"


def are_siblings(one: str, other: str) -> bool:
    """Whether both belong to one engine that lives, as different children of it."""
    a, b = _CHILD.match(one), _CHILD.match(other)
    return bool(a and b and a["engine"] == b["engine"] and a["child"] != b["child"])
