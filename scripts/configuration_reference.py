"""The tables of docs/configuration.md, compared with the code's own tables of keys.

    python scripts/configuration_reference.py           write defaults and rules into the page
    python scripts/configuration_reference.py --check   status 1 where the page says something else

The page has the sentences, and the defaults that only words can say. A key without a row, and a row
without a key, are errors. Needs neither vLLM nor the libraries of the carriers.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "kvferry"
PAGE = ROOT / "docs" / "configuration.md"
BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"
HANDOVER_ALSO = {  # keys that are read beside the dataclass
    "secret_file": "a path",
    "pool": "true, false or an object",
}
WITHOUT_EFFECT = {"VLLM_MOONCAKE_LOAD_RECV_THREADS"}  # that only vLLM's own connector reads
WHOSE = {
    "nixl": "`NixlConnector`, `NixlPullConnector`, `NixlPushConnector`",
    "mooncake": "`MooncakeConnector`",
    "store": "`MooncakeStoreConnector`",
}


def main() -> int:
    said = PAGE.read_text()
    text = said
    for name, make in tables().items():
        begin, end = BEGIN.format(name), END.format(name)
        head, rest = text.split(begin, 1)
        text = f"{head}{begin}\n{make()}\n{end}{rest.split(end, 1)[1]}"
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
        return 0
    if text != said:
        print(f"{PAGE} is not what the code says; run python {Path(__file__).name}")
    return int(text != said)


def tables() -> dict[str, Callable[[], str]]:
    """By the name of the marks that a table stands between."""
    return {
        "hand-over": handover,
        "pool": pool,
        "mooncake-store": mooncake_store,
        "their-keys": their_keys,
        "removed": removed,
        "carrier-options": carrier_options,
        "variables": variables,
        "router": router,
    }


def handover() -> str:
    config = import_module("kvferry.vllm.config")
    expected = {name: rule.expected for name, rule in config.rules(config.FerryConfig).items()}
    return keys("hand-over", defaults(config.FerryConfig), expected | HANDOVER_ALSO)


def pool() -> str:
    config = import_module("kvferry.vllm.pool.config")
    expected = {name: rule.expected for name, rule in config.rules(config.PoolConfig).items()}
    return keys("pool", defaults(config.PoolConfig), expected)


def mooncake_store() -> str:
    kind = import_module("kvferry.pool.mooncake").MooncakeStoreConfig
    return limits("mooncake-store", defaults(kind))


def router() -> str:
    return limits("router", defaults(import_module("kvferry.router.api").Limits))


def removed() -> str:
    keys = import_module("kvferry.vllm.config").REMOVED_KEYS
    return table(("key", ""), [(f"`{name}`", f"It {became}.") for name, became in keys.items()])


def their_keys() -> str:
    config = import_module("kvferry.vllm.config")
    known = {
        "nixl": config.IN_TREE["nixl"].keys,
        "mooncake": config.IN_TREE["mooncake"].keys,
        "store": import_module("kvferry.vllm.pool.config").MOONCAKE_ONLY,
    }
    rows = rows_of("their-keys")
    for style, names in known.items():
        require_same(style, names, [row[1].strip("`") for row in rows if row[0] == WHOSE[style]])
    return table(("of", "key", "here"), rows)


def carrier_options() -> str:
    auto = import_module("kvferry.carriers.auto")
    rows = rows_of("carrier-options")
    made = []
    for carrier in dict.fromkeys(row[0] for row in rows):
        name = carrier.strip("`")
        takes = inspect.signature(auto.carrier_class(name)).parameters
        mine = {row[1].strip("`"): row for row in rows if row[0] == carrier}
        require_same(name, set(takes) - auto.ENGINES_OWN, mine)
        for option, (_, shown, words, sentence) in mine.items():
            made.append((carrier, shown, default(words, takes[option].default), sentence))
    return table(("carrier", "option", "default", ""), made)


def variables() -> str:
    pattern = re.compile(r'"((?:KVFERRY|VLLM|MOONCAKE|OTEL)_[A-Z][A-Z_]+)"')
    read = {name for file in SOURCES.rglob("*.py") for name in pattern.findall(file.read_text())}
    rows = rows_of("variables")
    require_same("variables", read | WITHOUT_EFFECT, [row[0].strip("`") for row in rows])
    return table(("variable", ""), rows)


def keys(name: str, known: Mapping[str, Any], expected: Mapping[str, str]) -> str:
    rows = {row[0].strip("`"): row for row in rows_of(name)}
    require_same(name, expected, rows)
    made = [
        (shown, default(words, known.get(key)), expected[key], sentence)
        for key, (shown, words, _, sentence) in rows.items()
    ]
    return table(("key", "default", "takes", ""), made)


def limits(name: str, known: Mapping[str, Any]) -> str:
    rows = {row[0].strip("`"): row for row in rows_of(name)}
    require_same(name, known, rows)
    made = [
        (shown, default(words, known[key]), sentence)
        for key, (shown, words, sentence) in rows.items()
    ]
    return table(("key", "default", ""), made)


def rows_of(name: str) -> list[list[str]]:
    """The cells of a table as the page has them, without its head."""
    text = PAGE.read_text().split(BEGIN.format(name), 1)[1].split(END.format(name), 1)[0]
    lines = text.strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def defaults(kind: Any) -> dict[str, Any]:
    found = {}
    for one in fields(kind):
        made = one.default_factory() if one.default_factory is not MISSING else one.default
        found[one.name] = made
    return found


def default(words: str, value: Any) -> str:
    """The page's words, where they begin with the code's default, or where only words can say it.
    Words such as "none" may stand for 0."""
    shown = show(value)
    says_it = words.partition(";")[0] == shown or (shown == "0" and not words[0].isdecimal())
    return words if shown is None or says_it else shown


def show(value: Any) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value > 8192 and not value % size:  # 2048 connections are no KiB
                return f"{value // size} {unit}"
        return str(value)
    return f"`{value}`" if isinstance(value, str) and value else None


def require_same(what: str, known: Iterable[str], described: Iterable[str]) -> None:
    if odd := set(known) ^ set(described):
        raise SystemExit(
            f"{what}: {sorted(odd)} are known to the code or have a row in {PAGE}, not both"
        )


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(titles)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
