"""What a user of `kvferry doctor` says of the engines that are to run here.

The same words as in `kv_connector_extra_config`: `carriers`, `carrier_options`, `host`, `secret`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import DescriptionError
from kvferry.transport.auto import AUTO
from kvferry.transport.options import require_options

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Asked:
    carriers: tuple[str, ...] = (AUTO,)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    host: str | None = None  # None: loopback, as engines have it
    secret: str | None = field(default=None, repr=False)

    @classmethod
    def read(
        cls,
        carriers: str = "",
        options: str | None = None,
        host: str | None = None,
        secret: str | None = None,
    ) -> Asked:
        names = tuple(n for n in (part.strip() for part in carriers.split(",")) if n) or (AUTO,)
        try:
            found = json.loads(options) if options else {}
        except ValueError as error:
            raise DescriptionError(
                f"--options is JSON, as carrier_options in the configuration: {error}; found "
                f"{options!r}"
            ) from None
        require_options(names, found)
        return cls(names, found, host or None, secret)

    @property
    def is_auto(self) -> bool:
        return self.carriers == (AUTO,)

    @property
    def named(self) -> tuple[str, ...]:
        """Carriers that an engine here opens or does not start: those of which something is said.

        With "auto" among others it stays: engines know no such carrier.
        """
        own = () if self.is_auto else self.carriers
        return tuple(dict.fromkeys((*own, *self.options)))

    def wanted(self, gpu: bool) -> Sequence[str]:
        """`carriers`, as an engine takes them."""
        if not gpu:
            return self.carriers
        return tuple(dict.fromkeys("cuda" if name == "local" else name for name in self.carriers))

    def opening(self, name: str, host: str | None = None) -> dict[str, Any]:
        """How an engine here makes that carrier."""
        given = {"secret": self.secret, "host": self.host or host or LOOPBACK}
        return {**given, **self.options.get(name, {})}
