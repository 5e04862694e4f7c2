"""Amounts as people write them."""

from __future__ import annotations

import re

from kvferry.errors import DescriptionError

_BITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_link(text: str) -> float:
    """Bytes a second of a link written as 400Gbit, 50GB or 25GB/s."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([kmgt])(bit|b|B)(?:/s|ps)?\s*", text, re.IGNORECASE)
    if match is None:
        raise DescriptionError(f"cannot read the link {text!r}; write 400Gbit or 50GB")
    amount, prefix, unit = match.groups()
    bits = unit.lower() == "bit" or unit == "b"
    return float(amount) * _BITS[prefix.lower()] / (8 if bits else 1)


def show_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def show_seconds(seconds: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
