"""Keys that an operator may set, each with the rule that its value keeps.

    @dataclass(frozen=True, slots=True)
    class Config:
        port: Port = 0  # of the directory

`Port` is an int with a rule. `read_keys` takes what was parsed from JSON and gives a dataclass's
values. A text is never taken for a number or a truth value: "false" would count as true, and "64"
would pass the start and end the first request. null is as if the key were not there. Anything else
that breaks a rule is a `DescriptionError` with the key, what was expected and what was found; a
field without a rule cannot be read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from kvferry.errors import DescriptionError
from kvferry.units import MOST_PORT

MOST_SECONDS = 1e6  # ZMQ takes milliseconds in 32 bits, which is 24 days
MOST_COUNT = 1 << 31


@dataclass(frozen=True, slots=True)
class Rule:
    """`take` gives the value, or raises a ValueError that may say more, or what to do."""

    expected: str
    take: Callable[[Any], Any]
    hidden: bool = False  # the value goes into no message

    def read(self, name: str, value: Any) -> Any:
        try:
            return self.take(value)
        except ValueError as error:
            found = f"{value!r:.100}" if not (self.hidden and value) else type(value).__name__
            more = f"; {error}" if str(error) else ""
            raise DescriptionError(f"{name} must be {self.expected}, found {found}{more}") from None


def rules(kind: Any) -> dict[str, Rule]:
    """By field."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for name in (f.name for f in fields(kind)):
        parts = (hints[name], *get_args(hints[name]))  # `Port`, or `Port | None`
        said = [m for part in parts for m in getattr(part, "__metadata__", ())]
        if len(said) != 1 or not isinstance(said[0], Rule):
            raise TypeError(f"{kind.__name__}.{name} has no rule")
        found[name] = said[0]
    return found


def read_keys(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a dataclass's fields, of those that are given."""
    by = rules(kind)
    return {name: by[name].read(name, value) for name, value in told(given).items()}


def told(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is not null."""
    return {name: value for name, value in given.items() if value is not None}


def spelled(name: str, value: Any, rule: Rule, kind: type[int] | type[float]) -> Any:
    """A number that may be spelled out, in a variable or by a key that others define."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):  # the rule says what it should be
            value = kind(value)
    return rule.read(name, value)


def whole(least: int = 0, most: int = MOST_COUNT, what: str = "a whole number") -> Rule:
    def take(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:  # True is no number
            raise ValueError
        return value

    return Rule(f"{what} from {least} to {most}", take)


def amount(most: float, what: str) -> Rule:
    """More than nothing."""

    def take(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        if not 0 < value <= most:  # nor is NaN
            raise ValueError
        return value

    return Rule(f"{what}, more than 0 and at most {most:,.10g}", take)


def choice(*names: str) -> Rule:
    def take(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError
        return value

    return Rule(" or ".join(f'"{name}"' for name in names), take)


def take_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON also spells texts that have no bytes
        raise ValueError("it has characters that cannot be written") from None
    return value


def take_name(value: Any) -> str:
    if not take_text(value).strip():
        raise ValueError("leave the key out where there is none")
    return str(value)


def take_path(value: Any) -> str:
    if "\0" in take_name(value):
        raise ValueError("it has a null character")
    try:
        return str(Path(value).expanduser())
    except RuntimeError as error:  # whose home?
        raise ValueError(str(error)) from None


def _take_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("write it without quotation marks" if isinstance(value, str) else "")
    return value


def _take_texts(value: Any) -> tuple[str, ...]:
    """One text is a list of one."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not texts:
        raise ValueError
    return tuple(take_name(text) for text in texts)


def _take_options(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError
    return value


FLAG = Rule("true or false", _take_flag)
TEXT = Rule("a text", take_text)
SECRET = Rule("a text that is not empty", take_name, hidden=True)
PATH = Rule("a path", take_path)
NAMES = Rule("a name, or a list of names that is not empty", _take_texts)
OPTIONS = Rule("an object", _take_options)
PORT = whole(0, MOST_PORT, "a port")
COUNT = whole()
SECONDS = amount(MOST_SECONDS, "a number of seconds")
SHARE = amount(1, "a share")

Flag = Annotated[bool, FLAG]
Text = Annotated[str, TEXT]
Secret = Annotated[str, SECRET]
FilePath = Annotated[str, PATH]
Names = Annotated[tuple[str, ...], NAMES]
Options = Annotated[Mapping[str, Any], OPTIONS]
Port = Annotated[int, PORT]
Count = Annotated[int, COUNT]
Seconds = Annotated[float, SECONDS]
Share = Annotated[float, SHARE]
