"""Which carriers a benchmark measures. What was named must be there, and go its own way, or nothing
is measured; of what was not named, it is said why it is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.bench.movers import installed, quiet_libraries
from kvferry.errors import TransferError


@dataclass(slots=True)
class Wanted:
    names: list[str]  # what is measured
    missing: dict[str, str]  # what is not, though nobody chose, and why
    named: bool  # somebody asked for these

    @classmethod
    def of(cls, named: Sequence[str], among: Sequence[str]) -> Wanted:
        """Those that are named, or all that are installed."""
        for name in named:
            if name not in among:
                raise TransferError(
                    f"the carrier {name!r} is not measured here; choose among {', '.join(among)}"
                )
        with quiet_libraries():  # this loads them
            reasons = {name: why for name, why in installed().items() if name in among}
        for name in named:
            if reasons[name]:
                raise TransferError(reasons[name])
        if named:
            return cls(list(dict.fromkeys(named)), {}, True)
        missing = {name: why for name, why in reasons.items() if why}
        return cls([name for name in among if name not in missing], missing, False)

    def require_own_way(self, name: str, detour: str) -> bool:
        """False where it is left out: what goes by another carrier is not measured as itself."""
        if not detour:
            return True
        why = f"it goes by tcp here, which is measured as tcp: {detour}"
        if self.named:
            raise TransferError(f"{name} cannot be measured: {why}")
        self.names.remove(name)
        self.missing[name] = why
        return False
