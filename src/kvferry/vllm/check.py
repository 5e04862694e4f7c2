# SPDX-License-Identifier: Apache-2.0
"""Finds mistakes in an engine's `--kv-transfer-config` before any weights are loaded.

`kvferry check` calls `refusals` without vLLM. Inside vLLM, the plugin calls `require_settings` when
vLLM looks up the connector's class, which it does first when it makes its configuration. The rules
are those of `FerryConfig` and `PoolConfig`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import DescriptionError
from kvferry.vllm import STAND_INS
from kvferry.vllm.config import FerryConfig, Style, gathering
from kvferry.vllm.pool.config import PoolConfig

log = logging.getLogger("kvferry")

MODULE = "kvferry.vllm"
ROLES = ("kv_producer", "kv_consumer", "kv_both")
POLICIES = ("recompute", "fail")
# Of vLLM's KVTransferConfig.
FIELDS = """
enable_permute_local_kv engine_id kv_buffer_device kv_connector kv_connector_extra_config
kv_connector_module_path kv_load_failure_policy kv_port kv_role
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """A connector class: the style of its hand-over (None: the pool alone), and pool defaults."""

    style: Style | None
    pool_defaults: Mapping[str, Any] = field(default_factory=dict)


# By the names under which `kvferry.vllm` has the classes.
KINDS = {
    "FerryConnector": Kind("ferry"),
    "FerryMooncakeConnector": Kind("mooncake"),
    "FerryMooncakeStoreConnector": Kind(None, {"store": "mooncake", "save_decode_cache": False}),
    "FerryNixlConnector": Kind("nixl"),
    "FerryNixlPushConnector": Kind("push"),
    "FerryPoolConnector": Kind(None),
}
KINDS |= {theirs: KINDS[ours] for theirs, ours in STAND_INS.items()}


def sections(
    style: Style | None, extra: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The keys of the hand-over and those of the pool; None: the connector lacks that half."""
    extra = dict(extra)
    if style is None:
        return None, extra
    if style != "ferry":
        return extra, None
    section = extra.pop("pool", None)
    if section is not None and not isinstance(section, bool | Mapping):
        raise DescriptionError(
            f"`pool` in kv_connector_extra_config is true, false or an object, not {section!r}"
        )
    if section is None or section is False:
        return extra, None
    return extra, {} if section is True else dict(section)


def require_settings(
    style: Style | None, pool_defaults: Mapping[str, Any], extra: Mapping[str, Any]
) -> None:
    """Raise DescriptionError with all mistakes in a connector's own keys.

    It logs nothing: each process reads its settings again when it makes its connector.
    """
    with notes():
        found = _settings(Kind(style, pool_defaults), extra)
    if found:
        raise DescriptionError("; ".join(found))


def refusals(transfer: Mapping[str, Any]) -> list[str]:
    """All reasons why vLLM or the connector would refuse a parsed `--kv-transfer-config`."""
    found = []
    if unknown := sorted(set(transfer) - set(FIELDS.split())):
        found.append(f"vLLM does not know {unknown}; it knows {FIELDS.split()}")
    role = transfer.get("kv_role")
    if role not in ROLES:
        found.append(f"kv_role must be one of {', '.join(ROLES)}, found {role!r:.100}")
    policy = transfer.get("kv_load_failure_policy", "fail")
    if policy not in POLICIES:
        found.append(
            f"kv_load_failure_policy must be one of {', '.join(POLICIES)}, found {policy!r:.100}"
        )
    extra = transfer.get("kv_connector_extra_config")
    if not isinstance(extra, Mapping | None):
        return [*found, f"kv_connector_extra_config must be an object, found {extra!r:.100}"]
    name, module = transfer.get("kv_connector"), transfer.get("kv_connector_module_path")
    if name == "MultiConnector" and module is None:
        return found + _children(extra or {})
    if not isinstance(name, str) or name not in KINDS or module not in (None, MODULE):
        found.append(
            f"kv_connector {name!r:.100} of module {module!r:.100} is not kvferry's; kvferry has "
            f"{', '.join(sorted(KINDS))} of module {MODULE}"
        )
        return found
    if module is None and not name.startswith("Ferry"):
        found.append(
            f"{name} without kv_connector_module_path is vLLM's own connector; for kvferry's, add "
            f'"kv_connector_module_path": "{MODULE}"'
        )
        return found
    return found + _settings(KINDS[name], extra or {}, stores=True)


@contextmanager
def notes() -> Iterator[list[str]]:
    """Collect what kvferry logs in this block (keys without effect, a secret that others may read)
    instead of logging it."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    before = log.handlers, log.level, log.propagate
    log.handlers, log.propagate = [Keep()], False
    log.setLevel(logging.INFO)
    try:
        yield said
    finally:
        log.handlers, level, log.propagate = before
        log.setLevel(level)


def _children(extra: Mapping[str, Any]) -> list[str]:
    """Mistakes in those children of a MultiConnector that are kvferry's."""
    children = extra.get("connectors")
    if not isinstance(children, list) or not all(isinstance(c, Mapping) for c in children):
        return [f"connectors of MultiConnector must be a list of objects, found {children!r:.100}"]
    ours = [
        (number, child)
        for number, child in enumerate(children)
        if child.get("kv_connector_module_path") == MODULE
        or str(child.get("kv_connector")).startswith("Ferry")
    ]
    return [
        f"connectors[{number}]: {refusal}" for number, child in ours for refusal in refusals(child)
    ]


def _settings(kind: Kind, extra: Mapping[str, Any], *, stores: bool = False) -> list[str]:
    """Mistakes in the keys of one connector. `stores`: import its store, too."""
    found: list[str] = []
    try:
        handover, pool = sections(kind.style, extra)
    except DescriptionError as error:
        return [str(error)]
    if handover is not None:
        with gathering(found):
            FerryConfig.read(handover, kind.style or "ferry")
    if pool is not None:
        with gathering(found):
            config = PoolConfig.read(pool, **kind.pool_defaults)
            if stores or ":" not in config.store:
                config.opener()  # opens nothing yet
            if stores and config.store == "mooncake":
                from kvferry.pool.mooncake import MooncakeStoreConfig

                MooncakeStoreConfig.load_from_env()
    return found
