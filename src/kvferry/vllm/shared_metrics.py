"""Metrics that several children of a MultiConnector share: Prometheus takes a name once.

vLLM makes a logger's metrics in one go, each child's by a call with the same label values; another
logger unregisters what was there before, and has label values of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """What the last logger's first child made, for its other children."""

    def __init__(self) -> None:
        self._made: tuple[Any, T] | None = None  # by label values, which are kept: ids come again

    def get(self, labelvalues: Any, make: Callable[[], T]) -> T:
        if self._made is None or self._made[0] is not labelvalues:
            self._made = (labelvalues, make())
        return self._made[1]
