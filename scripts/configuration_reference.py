"""The tables of docs/configuration.md, from the code's own tables of keys.

    python scripts/configuration_reference.py           write them into the page
    python scripts/configuration_reference.py --check   status 1 where the page says something else

Names, defaults and rules come from the code. The sentences stand here: a key without a sentence,
and a sentence without a key, are errors. Needs neither vLLM nor the libraries of the carriers.
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

# A sentence, or the default in words and a sentence, where the default depends on something.
Words = str | tuple[str, str]

HANDOVER: Mapping[str, Words] = {
    "secret": (
        "`KVFERRY_SECRET`",
        "The secret itself, at least 16 bytes; vLLM logs it, so prefer `secret_file`.",
    ),
    "secret_file": (
        "`KVFERRY_SECRET`",
        "A file with the secret, the same on all engines; needed as soon as engines run on "
        "several hosts or as several users.",
    ),
    "host": (
        "loopback; of the drop-in classes with a secret, vLLM's own address",
        "The name or address at which peers reach this engine, without a port; a host on a "
        "network needs a secret.",
    ),
    "port": (
        "any",
        "The port of the engine's directory; data-parallel rank *n* listens at port + *n*.",
    ),
    "carriers": (
        '`"auto"`',
        "Carriers in order of preference; the first that reaches the peer is used, and `local` "
        "means `cuda` for a cache on a GPU. `auto`: `cuda`, `local`, `nixl`, `mooncake`, `tcp`.",
    ),
    "checksums": "On a decode engine: compare what arrives with digests that the prefill engine "
    "makes of its own memory.",
    "carrier_options": (
        "none",
        "Options of single carriers, by name ([below](#carrier-options)); a `mooncake` or `nixl` "
        "with options also takes part in `auto`.",
    ),
    "optional_carriers": (
        "none; of a drop-in class, its library",
        "Carriers that are left out with a warning where they cannot be used; others must work.",
    ),
    "mode": "On a decode engine: `push` lets the prefill engine write, over carriers that the "
    "receiver can stop (`tcp`); other carriers are read in both modes.",
    "lease_seconds": "How long a prefill engine keeps a hold without hearing from its consumer. "
    "A decode engine renews four times in its own `lease_seconds`: set the same on both sides.",
    "load_seconds": "After this time a load has failed.",
    "model_id": (
        "the last part of the model's path",
        "Names the weights, where their path differs between engines.",
    ),
    "draft_layers": "What a decode engine with a draft model does about a prefill engine without "
    "one: refuse it, or zero the draft layers of loaded blocks.",
    "load_failure_policy": (
        "vLLM's `kv_load_failure_policy` if the command line has it, else `recompute`",
        "Whether a request whose cache did not arrive is computed on the decode engine, or fails.",
    ),
    "max_held_blocks": (
        "half of the cache",
        "Blocks that finished prefills may keep, 0 for no limit; a prefill beyond it is not held, "
        "and its answer says so.",
    ),
    "peers": (
        "any",
        "Hosts that tickets and directories may name: addresses, networks and names; set it "
        "where clients are not trusted.",
    ),
    "bootstrap_port": (
        "none; of `MooncakeConnector`, 8998",
        "Where a prefill engine answers proxies in Mooncake style.",
    ),
    "bootstrap_server": (
        "none",
        "Another engine's bootstrap to register with, instead of one of its own.",
    ),
    "bootstrap_seconds": "For one question to a bootstrap or a directory; a request whose "
    "producer is not found in three times as long is computed by the decode engine.",
    "pool": (
        "none",
        "Of `FerryConnector`: `true`, or an object with the [keys of the pool](#pool), for a "
        "shared pool beside the hand-over.",
    ),
}
HANDOVER_ALSO = {  # keys that are read beside the dataclass
    "secret_file": "a path",
    "pool": "true, false or an object",
}
POOL: Mapping[str, Words] = {
    "store": "`embedded`, `mooncake`, or `module:function` that returns a "
    "`kvferry.pool.store.Store`.",
    "path": (
        "`/dev/shm/kvferry-USER`",
        "The directory of the embedded store; engines that name the same one share it.",
    ),
    "size": (
        "4 GiB",
        "The embedded store's memory tier, in powers of 1024; the engine that creates the store "
        "decides.",
    ),
    "disk_path": (
        "none",
        "The directory of the embedded store's disk tier; it belongs to one store, and needs "
        "`disk_size`.",
    ),
    "disk_size": ("none", "The size of the disk tier; it needs `disk_path`."),
    "options": ("none", "Arguments of a store of your own."),
    "cache_prefix": (
        "`KVFERRY_POOL_PREFIX`, or none",
        "The tenant: engines with different ones share nothing.",
    ),
    "model_id": (
        "the last part of the model's path",
        "Names the model, where its path differs between engines.",
    ),
    "weight_revision": (
        "the Hub's commit, or read off the files",
        "Names the weights ([what is shared with whom](pool.md#what-is-shared-with-whom)).",
    ),
    "enable_lookup": "Whether requests are looked up; `false` only saves.",
    "save_decode_cache": (
        "true; of `MooncakeStoreConnector` and `kv_consumer`, false",
        "Also save blocks that decoding fills; an engine that is `kv_consumer` saves nothing "
        "without it.",
    ),
    "lookup_seconds": "After this time a lookup is a miss.",
    "load_seconds": "After this time a load has failed, and the request is computed.",
    "save_seconds": "After this time a save is given up.",
    "min_load_tokens": "A shorter hit is computed instead; `auto`: a hit is computed where that "
    "is [faster than loading it](pool.md#how-it-works).",
    "checksums": "With Mooncake or a store of your own: keep a checksum with each object and "
    "verify it; the embedded store always does.",
    "pinned_share": "The share of the engine's blocks that saves may keep from reuse, twice as "
    "many when a request ends; more only where the store saves them in 0.1 s.",
}
THEIRS: Mapping[str, Mapping[str, str]] = {
    "nixl": {
        "kv_lease_duration": "Taken for `lease_seconds`.",
        "push_registration_timeout": "Taken for `load_seconds`.",
        "enforce_handshake_compat": "Refused unless `true`: what must be equal is always checked.",
        "bidirectional_kv_xfer": "Refused if set: not offered.",
        "backends": "Taken for `backends` of the carrier `nixl`, which is there by default.",
        "num_threads": "Taken for `threads` of the carrier `nixl`.",
        "engine_ttl": "No effect: what is known of a peer goes with its last connection.",
        "decoder_kv_blocks_ttl": "No effect: decode engines keep no blocks for later turns.",
        "kv_recompute_threshold": "No effect: only prefill engines that read from decode engines "
        "ask for it.",
    },
    "mooncake": {
        "bootstrap_server_address": "Taken for `bootstrap_server`.",
        "mooncake_protocol": "Taken for `protocol` of the carrier `mooncake`, which is there by "
        "default; `rdma` if unset, as in vLLM.",
        "device_name": "Taken for `device` of the carrier `mooncake`.",
        "num_workers": "Taken for `workers` of the carrier `mooncake`: threads for each peer.",
    },
    "store": {
        "preferred_segment": "No effect, and logged: Mooncake chooses where blocks lie.",
        "load_async": "Refused unless `true`: loads never stop the engine's steps.",
        "lookup_async": "No effect: lookups are always asynchronous.",
        "lookup_rpc_port": "No effect: no port is needed.",
        "discard_partial_chunks": "Refused unless `true`: only whole blocks have a key.",
        "consumer_is_to_put": "No effect; see `save_decode_cache`.",
        "custom_mem_pool": "No effect.",
        "enable_cross_layers_blocks": "No effect.",
        "enable_group_semantics": "No effect.",
        "enable_store_tp_lcm": "No effect: engines of a pool may have any tensor parallel size.",
        "prefer_alloc_in_same_node": "No effect.",
        "prefill_tp_sizes": "No effect.",
        "store_tp_size": "No effect.",
    },
}
CARRIER_OPTIONS: Mapping[str, Mapping[str, Words]] = {
    "local": {
        "workers": "Threads that run transfers.",
        "threads_per_transfer": "Threads that share one large transfer.",
        "force_fallback": "Use `tcp` even where the kernel would copy; for tests.",
    },
    "tcp": {
        "port": ("any", "The port to listen at."),
        "advertise": ("`host`", "The address that peers dial, where it is not `host`."),
        "streams_per_transfer": ("2; 4 for a GPU", "Connections that share one transfer."),
    },
    "cuda": {
        "triton": (
            "if it is installed",
            "Whether the copy kernel is used; without it, each run is one copy of the driver.",
        ),
    },
    "mooncake": {
        "protocol": "`tcp` or `rdma`; `rdma` is refused where no device is found.",
        "device": ("any", "Names of RDMA devices, with commas."),
        "workers": "Threads for each peer.",
    },
    "nixl": {
        "backends": ('`["UCX"]`', "NIXL's backends."),
        "threads": ("NIXL's choice", "Threads of NIXL's backend."),
    },
}
# Set by kvferry itself, or not written in JSON. `host` follows the engine's.
NOT_OPTIONS = {"secret", "admits", "host", "memory", "limits", "writable", "fabric", "faults"}
VARIABLES: Mapping[str, str] = {
    "KVFERRY_SECRET": "The secret, where no key gives one.",
    "KVFERRY_RUNTIME_DIR": "Where the user's key lies, instead of `/dev/shm/kvferry-run-UID`; a "
    "directory of this host.",
    "KVFERRY_ROUTER_TOKEN": "The token of the router's admin API, where `--token-file` gives none.",
    "KVFERRY_POOL_PREFIX": "The default of the pool's `cache_prefix`.",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "`host` of `NixlConnector` and `NixlPushConnector`.",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "`port` of `NixlConnector` and `NixlPushConnector`.",
    "VLLM_MOONCAKE_BOOTSTRAP_PORT": "`bootstrap_port` of `MooncakeConnector`.",
    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "`lease_seconds` and `load_seconds` of "
    "`MooncakeConnector`; 480 if unset.",
    "VLLM_MOONCAKE_CONNECTOR_TIMEOUT": "`bootstrap_seconds` of `MooncakeConnector`.",
    "VLLM_HOST_IP": "This host's address, for Mooncake Store, and for drop-in classes with a "
    "secret and no `host`.",
    "MOONCAKE_CONFIG_PATH": "A JSON file with the keys of Mooncake Store.",
    "MOONCAKE_MASTER": "Mooncake's master, `host:port`.",
    "MOONCAKE_DEVICE": "Mooncake Store's `device_name`.",
    "MOONCAKE_TE_META_DATA_SERVER": "Mooncake Store's `metadata_server`.",
    "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "The name under which other hosts reach this one.",
    "MOONCAKE_PREFERRED_SEGMENT": "Not supported, which is logged.",
    "VLLM_MOONCAKE_STORE_TIER_LOG": "Mooncake Store's `tier_log`.",
    "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO": "Mooncake Store's `staging_share`.",
    "VLLM_MOONCAKE_LOAD_RECV_THREADS": "No effect: four threads read the chunks of loads.",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "Of the router: where its "
    "[traces](operating.md#traces) go, such as `http://collector:4318/v1/traces`; without an "
    "endpoint there are none.",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "The same without the path `/v1/traces`.",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "How traces are sent: `http/protobuf`, or `grpc`, which "
    "needs the package `opentelemetry-exporter-otlp-proto-grpc`.",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "The same for all that OpenTelemetry sends.",
    "OTEL_TRACES_EXPORTER": "`none`: no traces.",
    "OTEL_SDK_DISABLED": "`true`: no traces.",
    "OTEL_SERVICE_NAME": "The router's name in traces; `kvferry-router` if unset.",
    "OTEL_RESOURCE_ATTRIBUTES": "More about the router in traces, as `key=value,key=value`.",
}
STORE: Mapping[str, Words] = {
    "master_server_address": ("required", "Mooncake's master, `host:port`."),
    "metadata_server": "Mooncake's metadata server.",
    "protocol": ("`tcp`; `rdma` where a file is read", "Mooncake's protocol."),
    "device_name": ("any", "RDMA devices, with commas."),
    "mode": "`embedded`: the engine gives memory to the pool; `standalone-store`: it gives none.",
    "global_segment_size": "Bytes that each engine process gives; 0 with `standalone-store`.",
    "local_buffer_size": "Bytes of the client's own buffer.",
    "tenant_id": "Mooncake's tenant.",
    "local_hostname": (
        "`VLLM_HOST_IP`, or the address from which the master is reached",
        "The name under which other hosts reach this one.",
    ),
    "enable_offload": "The pool has a disk tier: reads are cut to its buffer.",
    "staging_share": "Share of that buffer that one read may take; not in the file, but in "
    "`VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO`.",
    "tier_log": "Log where the objects of each load lie; not in the file, but in "
    "`VLLM_MOONCAKE_STORE_TIER_LOG`.",
}
ROUTER: Mapping[str, str] = {
    "tries": "Engines asked for one request, for each stage.",
    "max_engines": "Engines in the fleet; adding more is refused.",
    "max_running": "Requests at one engine. While all decode engines are at this limit, requests "
    "wait in line; a prefill engine at its limit is not asked.",
    "max_queued": "Requests in that line; more are answered 429.",
    "max_index_blocks": "Blocks of engines' caches that the router knows, of all engines together. "
    "The engine with the most loses its oldest ones first.",
    "max_connections": "Connections of clients; fewer where the limit of descriptors is low.",
    "max_viewers": "Browsers that follow the router's page; more are answered 429, and ask now "
    "and then.",
    "max_in_flight": "Requests whose body has come; more are answered 429.",
    "max_body_bytes": "One request's body; a larger one is answered 413.",
    "max_answer_bytes": "One answer that is not streamed; a larger one is answered 502.",
    "max_held_bytes": "All bodies and answers together, each byte counted twice; more is "
    "answered 503.",
    "address_share": "One address's share (an IPv6 /64) of connections, viewers, places, "
    "bytes and the line; set 1 behind a reverse proxy.",
    "retry_share": "Retries that each request allows all requests together. When they are used up, "
    "only what a dead engine did not answer is asked again.",
    "retry_burst": "Retries beyond that.",
    "header_seconds": "For a client to send headers, or to stay idle.",
    "body_seconds": "For a whole body; then 408.",
    "progress_seconds": "In this time `progress_bytes` of a body must come; else 408.",
    "progress_bytes": "See `progress_seconds`.",
    "client_seconds": "For a client to take 64 KiB of its answer.",
    "connect_seconds": "For a connection to an engine.",
    "prefill_seconds": "For a whole prefill: queueing, computing, answering.",
    "first_byte_seconds": "For the first byte of a streamed answer.",
    "answer_seconds": "For an answer that is not streamed.",
    "chunk_seconds": "Between two chunks of a stream.",
    "wait_seconds": "For a decode engine to come up, where none is; then 503.",
    "queue_seconds": "In line, while all decode engines are busy; then 429 with `Retry-After`.",
    "start_seconds": "In which a lost decode engine is expected back, for `Retry-After`; once the "
    "router has seen engines come back, their median time counts instead.",
    "drain_seconds": "For requests in flight when the router is told to stop.",
    "probe_every_seconds": "Between two probes of an engine.",
    "probe_seconds": "For one probe to be answered.",
    "fail_after": "Failures in a row that take an engine out; a refused connection counts fully.",
    "recover_after": "Good probes in a row that bring it back.",
    "reload_seconds": "Between two looks at files that may change: fleet, API keys, engines' key.",
    "tokenize_seconds": "For an engine to tokenize a prompt; after that it is placed by load.",
    "metrics_seconds": "Between two looks at an engine's metrics.",
    "dns_seconds": "Between two lookups of a name, `dns://name:port`.",
    "trial_seconds": "How long an engine that failed its trials stays out, at most.",
}


def main() -> int:
    return update(PAGE, tables(), __file__)


def update(page: Path, makers: Mapping[str, Callable[[], str]], script: str) -> int:
    """Write tables between their marks in a page; with `--check`, say whether they differ."""
    said = page.read_text()
    text = said
    for name, make in makers.items():
        begin, end = BEGIN.format(name), END.format(name)
        head, rest = text.split(begin, 1)
        text = f"{head}{begin}\n{make()}\n{end}{rest.split(end, 1)[1]}"
    if "--check" not in sys.argv[1:]:
        page.write_text(text)
        return 0
    if text != said:
        print(f"{page} is not what the code says; run python {Path(script).name}")
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
    rules = config.rules(config.FerryConfig)
    expected = {name: rule.expected for name, rule in rules.items()} | HANDOVER_ALSO
    return keys(defaults(config.FerryConfig), HANDOVER, expected)


def pool() -> str:
    config = import_module("kvferry.vllm.pool.config")
    rules = config.rules(config.PoolConfig)
    expected = {name: rule.expected for name, rule in rules.items()}
    return keys(defaults(config.PoolConfig), POOL, expected)


def mooncake_store() -> str:
    kind = import_module("kvferry.pool.mooncake").MooncakeStoreConfig
    return limits(defaults(kind), STORE)


def router() -> str:
    return limits(defaults(import_module("kvferry.router.api").Limits), ROUTER)


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
    whose = {
        "nixl": "`NixlConnector`, `NixlPullConnector`, `NixlPushConnector`",
        "mooncake": "`MooncakeConnector`",
        "store": "`MooncakeStoreConnector`",
    }
    rows = []
    for style, sentences in THEIRS.items():
        require_same(style, known[style], sentences)
        rows += [(whose[style], f"`{name}`", words) for name, words in sentences.items()]
    return table(("of", "key", "here"), rows)


def carrier_options() -> str:
    carriers = import_module("kvferry.carriers.auto").CARRIERS
    rows = []
    for name, sentences in CARRIER_OPTIONS.items():
        kind = carriers[name]
        if isinstance(kind, tuple):
            kind = getattr(import_module(kind[0]), kind[1])
        takes = inspect.signature(kind).parameters
        skipped = NOT_OPTIONS | ({"device"} if name == "nixl" else set())  # the cache's own GPU
        require_same(name, set(takes) - skipped, sentences)
        for option, words in sentences.items():
            default, sentence = split(words, takes[option].default)
            rows.append((f"`{name}`", f"`{option}`", default, sentence))
    return table(("carrier", "option", "default", ""), rows)


WITHOUT_EFFECT = {"VLLM_MOONCAKE_LOAD_RECV_THREADS"}  # that only vLLM's own connector reads


def variables() -> str:
    pattern = re.compile(r'"((?:KVFERRY|VLLM|MOONCAKE|OTEL)_[A-Z][A-Z_]+)"')
    read = {name for file in SOURCES.rglob("*.py") for name in pattern.findall(file.read_text())}
    require_same("variables", read | WITHOUT_EFFECT, VARIABLES)
    return table(("variable", ""), [(f"`{name}`", words) for name, words in VARIABLES.items()])


def keys(known: Mapping[str, Any], sentences: Mapping[str, Words], expected: Any) -> str:
    require_same("keys", expected, sentences)
    rows = []
    for name, words in sentences.items():
        default, sentence = split(words, known.get(name))
        rows.append((f"`{name}`", default, expected[name], sentence))
    return table(("key", "default", "takes", ""), rows)


def limits(known: Mapping[str, Any], sentences: Mapping[str, Words]) -> str:
    require_same("limits", known, sentences)
    rows = []
    for name, words in sentences.items():
        default, sentence = split(words, known[name])
        rows.append((f"`{name}`", default, sentence))
    return table(("key", "default", ""), rows)


def defaults(kind: Any) -> dict[str, Any]:
    found = {}
    for one in fields(kind):
        made = one.default_factory() if one.default_factory is not MISSING else one.default
        found[one.name] = made
    return found


def split(words: Words, default: Any) -> tuple[str, str]:
    """The default, in words where the table has them, and the sentence."""
    return words if isinstance(words, tuple) else (show(default), words)


def show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value > 8192 and not value % size:  # 2048 connections are no KiB
                return f"{value // size} {unit}"
        return str(value)
    if isinstance(value, str) and value:
        return f"`{value}`"
    raise ValueError(f"a default of {value!r} needs words")


def require_same(what: str, known: Iterable[str], described: Iterable[str]) -> None:
    if odd := set(known) ^ set(described):
        raise SystemExit(f"{what}: described here or known to the code, not both: {sorted(odd)}")


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(titles)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
