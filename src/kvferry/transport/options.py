"""Options of single carriers, as an operator writes them: `carrier_options`, by carrier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.errors import DescriptionError
from kvferry.transport.auto import AUTO
from kvferry.transport.registry import CARRIERS


def require_carriers(carriers: Sequence[str]) -> None:
    unknown = sorted(set(carriers) - set(CARRIERS) - {AUTO})
    if unknown or not carriers or (AUTO in carriers and len(carriers) > 1):
        raise DescriptionError(
            f'carriers is "{AUTO}", or a list of {", ".join(CARRIERS)}; found {list(carriers)}'
        )


def require_options(carriers: Sequence[str], options: Any) -> None:
    """Refuse what is no mapping of mappings, and options of carriers that are never opened."""
    if not isinstance(options, Mapping) or not all(
        isinstance(of_one, Mapping) for of_one in options.values()
    ):
        raise DescriptionError(
            "carrier_options must be a mapping of mappings, such as "
            f'{{"nixl": {{"backends": ["UCX"]}}}}; found {options!r}'
        )
    unknown = sorted(set(options) - set(CARRIERS))
    if unknown:
        raise DescriptionError(
            f"carrier_options are for {unknown}, and there are no such carriers; there are "
            f"{', '.join(CARRIERS)}"
        )
    ours = sorted({key for of_one in options.values() for key in of_one} & {"secret", "admits"})
    if ours:
        raise DescriptionError(
            f"carrier_options has {ours}, which all carriers share; configure secret_file and peers"
        )
    unused = sorted(set(options) - set(carriers))
    if unused and list(carriers) != [AUTO]:  # which opens what has options
        raise DescriptionError(
            f"carrier_options are for {unused}, but carriers are {list(carriers)}; add them there, "
            "or drop the options"
        )
