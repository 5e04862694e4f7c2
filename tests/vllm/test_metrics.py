"""What `/metrics` shows of hand-over and pool, with several connectors of ours under one
MultiConnector; no engines here."""

from __future__ import annotations

import json
import re
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")
with warnings.catch_warnings():  # torch warns of itself
    warnings.simplefilter("ignore")
    import kvferry.vllm.connector

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import (
    MooncakeStoreConnectorStats,
    MooncakeStorePromMetrics,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvferry.handover.load import Loaded
from kvferry.pool.orders import METRICS, PoolCounters, StoreOperation
from kvferry.vllm.metrics import ComputedHere, FerryStats, levels
from vllm_pairs import OURS

QUARANTINE = "vllm:kvferry_pool_blocks_quarantined"


class InTreeStore:
    """vLLM's own connector, which needs Mooncake to be imported; its metrics do not."""

    build_prom_metrics = MooncakeStorePromMetrics


class Exposed:
    """A registry of its own, and what it shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.kinds = {c: partial(c, registry=self.registry) for c in (Counter, Gauge, Histogram)}

    def build(self, cls: Any, transfer: Any) -> Any:
        config = SimpleNamespace(kv_transfer_config=transfer, instance_id="one")
        values: dict[int, list[object]] = {0: ["m", "0"]}
        return cls.build_prom_metrics(config, self.kinds, ["model_name", "engine"], values)

    def values(self, name: str) -> dict[str, float]:
        """By the last label's value."""
        text = generate_latest(self.registry).decode()
        found = re.findall(rf'^{name}{{.*?(?:(?:outcome|reason)="(.*?)".*?)?}} (\S+)$', text, re.M)
        return {label: float(value) for label, value in found}

    def lines(self, prefix: str) -> list[str]:
        """Series and values, without the times at which they were made."""
        lines = generate_latest(self.registry).decode().splitlines()
        return [x for x in lines if x.startswith(prefix) and "_created{" not in x]


def pooled(
    counters: PoolCounters | None = None, levels: dict[str, int] | None = None, **counts: int
) -> FerryStats:
    """A report with the pool's counts, and blocks in quarantine by reporter."""
    stats, counters = FerryStats(), counters or PoolCounters()
    for event, count in counts.items():
        counters.add(event, count)
    stats.add_pool(counters)
    for reporter, blocks in (levels or {}).items():
        stats.level(f"pool {reporter}", pool_blocks_quarantined=blocks)
    return stats


def multi(*children: tuple[str, dict[str, Any]]) -> Any:
    connectors = [
        {"kv_connector": name, **OURS, "kv_role": "kv_both", "kv_connector_extra_config": extra}
        for name, extra in children
    ]
    return SimpleNamespace(kv_connector_extra_config={"connectors": connectors}, engine_id="e")


def test_counts_add_up_over_ranks_and_over_time() -> None:
    ranks = []
    for rank in range(2):
        stats = FerryStats()
        steps = {"meet": 1.0, "claim": 2.0, "bind": 0.5}
        stats.loaded(Loaded("r", "", 100, 3, seconds=steps))
        steps = {"meet": 0.5, "offer": 0.5, "wait": 2.0, "push": 0.25}
        stats.loaded(Loaded("t", "", 100, 3, seconds=steps, pushed=True))
        stats.loaded(Loaded("s", "closed", kind="StaleTicket"))
        stats.level(f"0/0.{rank}", claims_parked=rank + 1)
        taken = stats.take()
        assert not taken.is_empty() and stats.take().is_empty()
        ranks.append(FerryStats(json.loads(json.dumps(taken.data))))  # as vLLM sends them
    both = ranks[0].aggregate(ranks[1])
    assert both.data["claim_seconds"] == [3.0] * 4
    assert both.data["transfer_seconds"] == [0.0, 0.25] * 2  # waiting is no transfer
    assert both.data["load_failures"] == {"StaleTicket": 2}
    assert levels(both.data["levels"])["claims_parked"] == 3
    later = FerryStats()
    later.level("0/0.1", claims_parked=0)
    line = both.aggregate(later).reduce()
    assert line["claims_parked"] == 1 and line["failed: StaleTicket"] == 2
    assert line["loads"] == 4


def test_hand_overs_under_one_multi_connector_share_metrics() -> None:
    shown = Exposed()
    metrics = shown.build(MultiConnector, multi(("MooncakeConnector", {}), ("NixlConnector", {})))
    for held, cls in enumerate((kvferry.vllm.MooncakeConnector, kvferry.vllm.NixlConnector), 1):
        stats = FerryStats()
        stats.level(f"{held}/scheduler", held_blocks=held)
        metrics.observe({cls.__name__: stats.data}, 0)
    assert shown.values("vllm:kvferry_held_blocks") == {"": 3}
    text = generate_latest(shown.registry).decode()
    exposed = set(re.findall(r"^([a-z_:]+?)(?:\{| )", text, re.M))
    dashboard = (Path(__file__).parents[2] / "dashboards" / "kvferry.json").read_text()
    named = set(re.findall(r"vllm:(?!kvferry_pool_)[a-z_]+", dashboard))
    assert len(named) >= 14 and named <= exposed, named - exposed
    assert "vllm:kvferry_requests_computed_here_total" in named


def test_pools_under_one_multi_connector_share_metrics() -> None:
    shown = Exposed()
    names = ("FerryConnector", "FerryPoolConnector", "MooncakeStoreConnector")
    both, pool, store = names[0], names[1], kvferry.vllm.MooncakeStoreConnector.__name__
    metrics = shown.build(MultiConnector, multi((both, {"pool": True}), (pool, {}), (names[2], {})))
    for name, metric in METRICS.items():
        told = shown.values(f"vllm:kvferry_pool_{name}_total")
        assert set(told) == set(metric.events.values()) and not any(told.values())
    assert shown.values(QUARANTINE) == {"": 0}
    for told in (
        {both: pooled(loads=1, levels={"0": 7}).data},
        {pool: pooled(loads=2, levels={"1": 5}).data, store: pooled(save_errors=4).data},
    ):
        metrics.observe(told, 0)
    assert shown.values("vllm:kvferry_pool_loads_total") == {"": 3}
    assert shown.values("vllm:kvferry_pool_save_errors_total") == {"": 4}
    assert shown.values(QUARANTINE) == {"": 12}
    metrics.observe({both: pooled(levels={"0": 0}).data}, 0)
    assert shown.values(QUARANTINE) == {"": 5}  # it falls again


def test_the_store_has_the_names_of_vllms_own_connector() -> None:
    """The same calls of a store, told to both: the same metrics, labels, buckets and values."""
    counters = PoolCounters()
    with counters.operation(StoreOperation("load_get", 5, 4096)) as get:
        get.failed = 2
    with counters.operation(StoreOperation("lookup_exists", 7)):
        pass
    with suppress(OSError), counters.operation(StoreOperation("save_put", 3, 300)):
        raise OSError("the store is gone")
    told = pooled(counters)
    assert counters.take_operations() == []
    theirs, ours, others = Exposed(), Exposed(), Exposed()
    stats = MooncakeStoreConnectorStats()
    for one in told.data["pool_operations"]:
        stats.record_operation(
            one["name"],
            one["seconds"],
            one["keys"],
            num_bytes=one["bytes"],
            status=one["status"],
            num_failed_keys=one["failed"],
        )
    transfer = SimpleNamespace(kv_connector_extra_config={})
    theirs.build(InTreeStore, transfer).observe(stats.data, 0)
    ours.build(kvferry.vllm.MooncakeStoreConnector, transfer).observe(told.data, 0)
    others.build(kvferry.vllm.FerryPoolConnector, transfer).observe(told.data, 0)
    expected = theirs.lines("vllm:mooncake_store_")
    assert len(expected) > 30 and ours.lines("vllm:mooncake_store_") == expected
    assert others.lines("vllm:mooncake_store_") == []
    assert told.reduce() == {}  # the line of log has the pool's own counts


def test_names_that_another_connector_has_are_left_to_it() -> None:
    shown = Exposed()
    transfer = SimpleNamespace(kv_connector_extra_config={})
    shown.build(InTreeStore, transfer)
    metrics = shown.build(kvferry.vllm.MooncakeStoreConnector, transfer)
    counters = PoolCounters()
    with counters.operation(StoreOperation("load_get", 5, 4096)):
        pass
    metrics.observe(pooled(counters, loads=1).data, 0)
    assert shown.values("vllm:kvferry_pool_loads_total") == {"": 1}


def test_another_logger_has_metrics_of_its_own() -> None:
    """A second one in the same process: vLLM has unregistered those of the first."""
    for _ in range(2):
        shown = Exposed()
        transfer = SimpleNamespace(kv_connector_extra_config={"pool": {}})
        metrics = shown.build(kvferry.vllm.FerryConnector, transfer)
        stats = pooled(loads=1)
        stats.count("requests_computed_here", "no ticket", 2)
        metrics.observe(stats.data, 0)
        here = shown.values("vllm:kvferry_requests_computed_here_total")
        assert here == {reason: 2 * (reason == "no ticket") for reason in get_args(ComputedHere)}
        assert shown.values("vllm:kvferry_pool_loads_total") == {"": 1}


@pytest.mark.parametrize(
    ("extra", "has_pool"), [({}, 0), ({"pool": False}, 0), ({"pool": None}, 0), ({"pool": {}}, 1)]
)
def test_a_pool_is_shown_where_there_is_one(extra: dict[str, Any], has_pool: int) -> None:
    shown = Exposed()
    shown.build(kvferry.vllm.FerryConnector, SimpleNamespace(kv_connector_extra_config=extra))
    assert bool(shown.values(QUARANTINE)) == bool(has_pool)
    assert shown.values("vllm:kvferry_holds_open") == {"": 0}


def test_the_pool_s_line_of_log() -> None:
    """Counts add up; levels are those that were told last."""
    stats = pooled(loads=1, levels={"0": 7})
    stats = stats.aggregate(pooled(loads=2, save_done=1, levels={"1": 2}))
    counts = {"pool loads": 3, "pool save_done": 1}
    assert stats.reduce() == {**counts, "pool blocks_quarantined": 9}
    stats = stats.aggregate(pooled(levels={"0": 0}))
    assert stats.reduce()["pool blocks_quarantined"] == 2
    assert stats.aggregate(pooled(levels={"1": 0})).reduce() == counts


def test_halves_add_up_apart() -> None:
    """Either may be missing in a report; the line of log tells them apart."""
    handed_over = FerryStats()
    handed_over.count("requests_computed_here", "no ticket", 2)
    both = kvferry.vllm.FerryConnector.build_kv_connector_stats(None)
    assert both.is_empty() and pooled().is_empty()
    for one in (handed_over, pooled(loads=3), pooled(loads=3)):
        both = both.aggregate(one)
    line = both.reduce()
    assert (line["computed here: no ticket"], line["pool loads"]) == (2, 6)


def test_a_stand_in_has_the_metrics_of_vllm_s_nixl_connector() -> None:
    """With its names, kinds and buckets; in one registry with them, its own come first."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import stats as theirs

    transfer = SimpleNamespace(kv_connector_extra_config={})
    shown, in_tree = Exposed(), Exposed()
    labels: dict[int, list[object]] = {0: ["m", "0"]}
    theirs.NixlPromMetrics(
        SimpleNamespace(kv_transfer_config=transfer),
        in_tree.kinds,
        ["model_name", "engine"],
        labels,
    )
    stats = FerryStats()
    seconds = {"bind": 0.002, "read": 0.02, "push": 0.01}
    for moved in (1 << 20, 3 << 20):
        stats.loaded(Loaded("r", bytes=moved, descriptors=15, seconds=seconds))
    stats.loaded(Loaded("r", error="gone", kind="PeerLost"))
    stats.count("holds_closed", "expired", 2)
    stats.count("holds_closed", "delivered", 5)
    made = shown.build(kvferry.vllm.NixlPullConnector, transfer)
    made.observe(stats.data)

    def named(exposed: Exposed) -> set[str]:
        text = generate_latest(exposed.registry).decode()
        return set(re.findall(r"^(vllm:nixl_(?!\w+_created)\S+) ", text, re.M))

    assert named(shown) == named(in_tree) and len(named(shown)) > 60
    for name, value in {
        "xfer_time_seconds_sum": 0.06,
        "post_time_seconds_count": 2,
        "bytes_transferred_sum": 4 << 20,
        "num_descriptors_sum": 30,
        "num_failed_transfers_total": 1,
        "num_kv_expired_reqs_total": 2,
        "num_notifications_after_expiry_total": 0,
        "num_failed_notifications_total": 0,
    }.items():
        assert shown.values(f"vllm:nixl_{name}")[""] == pytest.approx(value), name
    other = Exposed()
    other.build(kvferry.vllm.MooncakeConnector, transfer).observe(stats.data)
    assert not named(other)
    in_tree.build(kvferry.vllm.NixlConnector, transfer).observe(stats.data)  # does not raise
    assert in_tree.values("vllm:nixl_bytes_transferred_count")[""] == 0  # it is theirs
