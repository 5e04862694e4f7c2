"""Every metric that the dashboard and the alert rules name exists; every part has panels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from kvferry.pool.orders import METRICS
from kvferry.router.api import RouterConfig
from kvferry.router.app import metrics_text
from kvferry.router.flow import Router
from kvferry.vllm.metrics import BY_REASON, COUNTERS, HISTOGRAMS, LEVELS

FOLDER = Path(__file__).parents[2] / "dashboards"
OF_A_HISTOGRAM = ("_bucket", "_sum", "_count")
NAME = re.compile(r"\b(?:vllm:)?kvferry_\w+")


def exposed() -> dict[str, set[str]]:
    """The labels of each metric that engines and the router expose."""
    found = {f"kvferry_{name}{end}": set() for name in HISTOGRAMS for end in OF_A_HISTOGRAM}
    found |= {f"kvferry_{name}_total": set() for name in COUNTERS}
    found |= {f"kvferry_{name}_total": {"reason"} for name in BY_REASON}
    for name, metric in METRICS.items():
        labelled = any(metric.events.values())
        found[f"kvferry_pool_{name}_total"] = {"outcome"} if labelled else set()
    found |= {f"kvferry_{name}": set() for name in LEVELS}
    found = {f"vllm:{name}": labels | {"model_name"} for name, labels in found.items()}
    config = RouterConfig(("http://127.0.0.1:1",), ("http://127.0.0.1:2",))
    text = metrics_text(Router(config))
    for name, labels in re.findall(r"^(kvferry_\w+)(?:{(.*)})? ", text, re.M):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return {name: labels | {"instance"} for name, labels in found.items()}


def queries() -> dict[str, list[str]]:
    panels: list[dict[str, Any]] = json.loads((FOLDER / "kvferry.json").read_text())["panels"]
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return {
        "dashboard": [target["expr"] for panel in panels for target in panel.get("targets", ())],
        "alerts": [rule["expr"] for group in rules for rule in group["rules"]],
    }


def test_every_metric_and_label_that_is_asked_for_exists() -> None:
    there = exposed()
    for where, asked in queries().items():
        for query in asked:
            assert NAME.search(query), query
            for name in NAME.findall(query):
                assert name in there, f"{where}: {name}"
            labels = {label for name in NAME.findall(query) for label in there[name]} | {"le"}
            for chosen in re.findall(r"{([^}]*)}", query):
                assert set(re.findall(r"(\w+)[=!]~?=?\"", chosen)) <= labels, query
            for kept in re.findall(r"by \(([^)]*)\)", query):
                assert set(kept.split(", ")) <= labels, query


def test_engines_pool_and_router_have_panels_and_alerts() -> None:
    for asked in queries().values():
        named = {name for query in asked for name in NAME.findall(query)}
        for part in ("vllm:kvferry_load", "vllm:kvferry_pool_", "kvferry_router_"):
            assert sum(name.startswith(part) for name in named) >= 1, part
    assert sum("kvferry_router_" in query for query in queries()["dashboard"]) >= 15
    assert sum("kvferry_pool_" in query for query in queries()["dashboard"]) >= 10


def test_panels_are_apart_and_what_must_stay_low_has_a_threshold() -> None:
    panels = json.loads((FOLDER / "kvferry.json").read_text())["panels"]
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in panels]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in panels})
    shown = {p["title"]: p["fieldConfig"]["defaults"] for p in panels if p["type"] != "row"}
    marked = {title for title, settings in shown.items() if "thresholds" in settings}
    assert marked >= {
        "Failed loads",
        "Quarantine",
        "Pool loads that failed",
        "Pool quarantine",
        "First byte",
        "Engine failures",
    }


def test_an_alert_says_how_bad_it_is_and_what_to_do() -> None:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
