"""The targets that the chart gives to Prometheus, for combinations of values: all are reachable,
and none is missing."""

import itertools
from pathlib import Path

import pytest
import yaml
from tests.deploy.chart import Manifest, render

CONFIG = {"gateway": {"interfaces": ["eth0"]}, "web": {"metricsFrom": ["10.244.0.0/16"]}}
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
LISTENS = (None, "127.0.0.1", "*")
"""The cases of gateways and nodes: not enabled, or enabled and listening on this address."""


def values_of(
    controller: bool, gateway: str | None, node: str | None, metrics_from: list[Manifest]
) -> Manifest:
    return {
        "config": CONFIG,
        "controller": {"enabled": controller},
        "gateway": {"enabled": gateway is not None, "listen": gateway or "*"},
        "node": {
            "enabled": node is not None,
            "listen": node or "*",
            "apiServer": {"host": "192.0.2.1"},
        },
        "networkPolicy": {"metricsFrom": metrics_from},
        "metrics": {"podMonitor": {"enabled": True}},
    }


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Evaluate a label selector with equality and `In`, the only operators that the chart uses."""
    assert all(each["operator"] == "In" for each in selector.get("matchExpressions", ()))
    equal = all(
        labels.get(name) == value for name, value in selector.get("matchLabels", {}).items()
    )
    return equal and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", ())
    )


def reachable(objects: list[Manifest], workload: Manifest, port: str) -> bool:
    """Return whether a Prometheus in the namespace `monitoring` can reach this port of the
    workload's pods."""
    template = workload["spec"]["template"]
    (container,) = template["spec"]["containers"]
    number = {each["name"]: each["containerPort"] for each in container["ports"]}[port]
    (listen,) = (
        argument.removeprefix("--listen=")
        for argument in container["args"]
        if argument.startswith("--listen=")
    )
    if listen != f"*:{number}":
        return False
    policies = (
        []
        if template["spec"].get("hostNetwork")
        else [each for each in objects if each["kind"] == "NetworkPolicy"]
    )
    applied = [
        each["spec"]
        for each in policies
        if selects(each["spec"]["podSelector"], template["metadata"]["labels"])
    ]
    rules = [rule for spec in applied for rule in spec["ingress"]]
    through = [
        rule for rule in rules if any(each["port"] in (port, number) for each in rule["ports"])
    ]
    return not applied or any("from" not in rule or MONITORING in rule["from"] for rule in through)


CASES = [
    case
    for case in itertools.product((True, False), LISTENS, LISTENS, ([], [MONITORING]))
    if case[0] or "*" in case[1:3]  # the chart rejects a monitor without targets
]


def test_every_target_can_be_scraped(helm: Path, tmp_path: Path) -> None:
    wrong = []
    for case in CASES:
        (tmp_path / "values.yaml").write_text(yaml.safe_dump(values_of(*case)))
        objects = render(helm, "--values", tmp_path / "values.yaml")
        assert not [each for each in objects if each["kind"] == "ServiceMonitor"]
        (monitor,) = (each["spec"] for each in objects if each["kind"] == "PodMonitor")
        (endpoint,) = monitor["podMetricsEndpoints"]
        for workload in (each for each in objects if each["kind"] in ("Deployment", "DaemonSet")):
            scraped = selects(
                monitor["selector"], workload["spec"]["template"]["metadata"]["labels"]
            )
            if scraped != reachable(objects, workload, endpoint["port"]):
                wrong.append(
                    (case, workload["metadata"]["name"], "selected" if scraped else "forgotten")
                )
    assert not wrong


def test_there_is_no_pod_monitor_by_default(helm: Path) -> None:
    assert not [
        each for each in render(helm) if each["apiVersion"].startswith("monitoring.coreos.com/")
    ]


@pytest.mark.parametrize("labels", [{"release": "prometheus"}])
def test_the_monitor_has_the_labels_by_which_prometheus_finds_it(
    helm: Path, tmp_path: Path, labels: dict[str, str]
) -> None:
    given = {
        "config": CONFIG,
        "metrics": {"podMonitor": {"enabled": True, "labels": labels, "interval": "15s"}},
    }
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(given))
    (monitor,) = (
        each
        for each in render(helm, "--values", tmp_path / "values.yaml")
        if each["kind"] == "PodMonitor"
    )
    assert labels.items() <= monitor["metadata"]["labels"].items()
    assert monitor["spec"]["podMetricsEndpoints"][0]["interval"] == "15s"
