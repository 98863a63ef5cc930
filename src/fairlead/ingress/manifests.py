"""Settings of an ingress controller as Kubernetes objects, or as values of its Helm chart.

In: `Settings`. Out: dictionaries for YAML. Pure. The keys are those of the charts in
`settings.CHARTS`, at the versions named there (values.yaml and the template of the Service)."""

from collections.abc import Mapping
from typing import Any

from fairlead.ingress.settings import CHARTS, Options, Settings


def objects(options: Options, made: Settings) -> list[dict[str, Any]]:
    """Return the Service, and the ConfigMap if the controller has settings in one. Traefik has
    arguments instead."""
    ports = [
        {"name": name, "port": port, "protocol": "TCP", "targetPort": target}
        for port, name, target in CHARTS[options.controller].ports
    ]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(made, made.annotations),
        "spec": {**made.service_spec, "selector": dict(made.labels), "ports": ports},
    }
    if not made.config or options.controller == "traefik":
        return [service]
    return [
        service,
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": _metadata(made, {}),
            "data": dict(made.config),
        },
    ]


def arguments(options: Options, made: Settings) -> list[str]:
    """Return the required arguments of Traefik's command line; empty for other controllers."""
    return (
        [f"--{name}={value}" for name, value in made.config.items()]
        if options.controller == "traefik"
        else []
    )


def values(options: Options, made: Settings) -> dict[str, Any]:
    """Return the values for `helm upgrade --install RELEASE CHART --values -`."""
    return (
        _traefik(options, made)
        if options.controller == "traefik"
        else {"controller": _controller(options, made)}
    )


def _controller(options: Options, made: Settings) -> dict[str, Any]:
    """Return the values of `controller`, whose keys here are the same in the charts of
    ingress-nginx and HAProxy."""
    service: dict[str, Any] = dict(made.service_spec)
    if made.annotations:
        service["annotations"] = dict(made.annotations)
    if options.controller == "haproxy":
        # By default this chart also publishes HTTP/3, statistics and administrative ports. A load
        # balancer that sends PROXY headers does not serve UDP, and statistics and administrative
        # ports must not be reachable from outside.
        service["enablePorts"] = {
            "http": True,
            "https": True,
            "quic": options.load_balancer_class == "direct",
            "stat": False,
            "admin": False,
        }
    return (
        _workload(options, made, "replicaCount")
        | ({"config": dict(made.config)} if made.config else {})
        | {"service": service}
    )


def _traefik(options: Options, made: Settings) -> dict[str, Any]:
    service: dict[str, Any] = {"spec": dict(made.service_spec)}
    if made.annotations:
        service = {"annotations": dict(made.annotations)} | service
    workload = _workload(options, made, "replicas")
    affinity = workload.pop("affinity", None)
    found: dict[str, Any] = {"deployment": workload}
    if affinity:
        found["affinity"] = affinity
    if made.trusted:
        found["ports"] = {
            name: {"proxyProtocol": {"trustedIPs": list(made.trusted)}}
            for _, name, _ in CHARTS[options.controller].ports
        }
    return found | {"service": service}


def _workload(options: Options, made: Settings, replicas: str) -> dict[str, Any]:
    if options.workload == "daemonset":
        return {"kind": "DaemonSet"}
    return {"kind": "Deployment", replicas: options.replicas, "affinity": dict(made.affinity)}


def _metadata(made: Settings, annotations: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": made.name, "namespace": made.namespace}
    return found | ({"annotations": dict(annotations)} if annotations else {})
