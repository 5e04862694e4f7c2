# SPDX-License-Identifier: Apache-2.0
"""Read amounts that people write, and write amounts for people."""

from __future__ import annotations

import math
import re

from kvferry.errors import DescriptionError

MOST_PORT = 65535
_LINK = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt])(bit|b|B)(?:/s|ps)?\s*", re.IGNORECASE)
_SIZE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)
_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_link(text: str) -> float:
    """Bytes a second of a link that is written as 400Gbit, 50GB or 25GB/s."""
    match = _LINK.fullmatch(text)
    if match is None:
        raise DescriptionError(f"cannot read the link {text!r}; write 400Gbit or 50GB")
    amount, prefix, unit = match.groups()
    bits = unit.lower() == "bit" or unit == "b"
    speed = float(amount) * _BITS[prefix.lower()] / (8 if bits else 1)
    if not 0 < speed < math.inf:
        raise DescriptionError(
            f"a link must have some speed, found {text!r}; write 400Gbit or 50GB"
        )
    return speed


def parse_size(value: object) -> int:
    """Bytes of 80GB, 80GiB, .5GB, "512 mb", 1024; all of these units are powers of 1024."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(str(value))
    if match is None:
        raise DescriptionError(
            f"cannot read the size {value!r}; write 80GB, 512MB or a number of bytes"
        )
    amount, unit = match.groups()
    return int(float(amount) * _BYTES[unit.lower()])


def require_port(port: int) -> int:
    """Refuse a number that is no port to listen on. With 0 the system chooses a port."""
    if not 0 <= port <= MOST_PORT:
        raise DescriptionError(
            f"a port to listen on is 1 to {MOST_PORT}, or 0 for any that is free; found {port}"
        )
    return port


def show_bytes(count: float) -> str:
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def show_seconds(seconds: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{show_number(seconds * factor)} {unit}"
    return f"{show_number(seconds * 1e9)} ns"


def show_number(value: float) -> str:
    """Three digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
