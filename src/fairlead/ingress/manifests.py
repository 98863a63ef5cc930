"""Settings of an ingress controller as Kubernetes objects, or as values of its Helm chart.

In: `Settings`. Out: plain dictionaries, ready for YAML. Pure. Keys are those of the charts in
`settings.CHARTS`, at the versions named there (each chart's values.yaml, and its Service's
template)."""

from collections.abc import Mapping
from typing import Any

from fairlead.ingress.settings import CHARTS, Options, Settings


def objects(options: Options, made: Settings) -> list[dict[str, Any]]:
    """The Service, and the ConfigMap if the controller has settings in one (Traefik has arguments
    instead)."""
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
    """What the controller's command line must have; of all but Traefik, nothing."""
    return (
        [f"--{name}={value}" for name, value in made.config.items()]
        if options.controller == "traefik"
        else []
    )


def values(options: Options, made: Settings) -> dict[str, Any]:
    """For `helm upgrade --install RELEASE CHART --values -`."""
    return (
        _traefik(options, made)
        if options.controller == "traefik"
        else {"controller": _controller(options, made)}
    )


def _controller(options: Options, made: Settings) -> dict[str, Any]:
    """Of ingress-nginx's and HAProxy's charts, which have the same keys here."""
    service: dict[str, Any] = dict(made.service_spec)
    if made.annotations:
        service["annotations"] = dict(made.annotations)
    if options.controller == "haproxy":
        # This chart publishes HTTP/3, its statistics and its own interfaces beside HTTP and HTTPS,
        # unless told not to. A balancer that speaks PROXY protocol has no UDP, and the rest is
        # nobody's business out there.
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
