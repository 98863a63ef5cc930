"""Random changes to a cluster, like those of users and of rollouts.

In: a random source and the desired state. Out: a sequence of `Change`s: objects to apply, patch and
delete. Pure. Invariant: equal seeds give equal changes, whatever the cluster does meanwhile; an API
server accepts every change. There are two apps, with a few pods and a few Services each. Pods exist
in two makes, which give the same port name to different port numbers, so that a named port means
different numbers behind one Service."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple

from tests.e2e.oracle import EXCLUDE_LABEL, OUR_CLASS

from fairlead.lab.objects import READY_ANNOTATION

Manifest = dict[str, Any]

APPS = ("red", "blue")
NODES = ("node1", "node2", "node3")
MAX_PODS, MAX_SERVICES = 8, 5
NUMBERS = (8080, 9090), (5353, 5354)
PORTS: Mapping[str, tuple[int, str, tuple[int | str, ...]]] = {
    "web": (80, "TCP", ("web", 8080, 9090)),
    "dns": (53, "UDP", ("dns", 5353, 5354)),
    "dns-tcp": (53, "TCP", ("web", 9090)),
    "admin": (8081, "TCP", ("admin",)),
}
RANGES: tuple[list[str], ...] = (
    [],
    ["198.51.100.11/32"],
    ["198.51.100.0/24", " 10.244.0.0/16", "2001:db8:2::c/128"],
    ["192.0.2.0/24", "2001:db8:244::/48"],
    ["2001:db8:2::/64"],
)
FOREIGN_CLASS = "example.com/other"


class Change(NamedTuple):
    """One step: objects to delete, then objects to apply, then merge patches by kind and name."""

    text: str
    services: tuple[str, ...] = ()
    apply: tuple[Manifest, ...] = ()
    patch: tuple[tuple[str, str, Manifest], ...] = ()
    delete: tuple[tuple[str, str], ...] = ()


class DesiredState:
    """The state that has been requested so far, and the choice of the next change."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.pods: dict[str, str] = {}
        """The app of each pod, by the name of the pod."""
        self.services: dict[str, Manifest] = {}
        self.unready: set[str] = set()
        self.excluded: set[str] = set()
        self._number = 0
        self._kinds: list[tuple[int, Callable[[], Change | None]]] = [
            (14, self.add_pod),
            (9, self.remove_pod),
            (14, self.toggle_readiness),
            (6, self.move_pod),
            (3, self.relabel_pod),
            (8, self.add_service),
            (5, self.delete_service),
            (3, self.replace_service),
            (24, self.edit_service),
            (3, self.retype_service),
            (3, self.exclude_node),
        ]

    def next(self) -> Change:
        """Return the next change. Changes that are impossible at present are skipped."""
        while True:
            (kind,) = self.random.choices(
                [make for _, make in self._kinds], [weight for weight, _ in self._kinds]
            )
            if (change := kind()) is not None:
                return change

    def add_pod(self) -> Change | None:
        if len(self.pods) >= MAX_PODS:
            return None
        manifest, text = self._new_pod()
        return Change(f"add {text}", apply=(manifest,))

    def remove_pod(self) -> Change | None:
        if not self.pods:
            return None
        name = self._forget_pod()
        return Change(f"delete pod {name}", delete=(("pods", name),))

    def move_pod(self) -> Change | None:
        if not self.pods:
            return None
        gone = self._forget_pod()
        manifest, text = self._new_pod()
        return Change(f"delete pod {gone}, add {text}", apply=(manifest,), delete=(("pods", gone),))

    def toggle_readiness(self) -> Change | None:
        if not self.pods:
            return None
        name = self.random.choice(sorted(self.pods))
        ready = name in self.unready
        self.unready ^= {name}
        patch = {"metadata": {"annotations": {READY_ANNOTATION: None if ready else "false"}}}
        return Change(
            f"make pod {name} {'ready' if ready else 'unready'}", patch=(("pods", name, patch),)
        )

    def relabel_pod(self) -> Change | None:
        if not self.pods:
            return None
        name = self.random.choice(sorted(self.pods))
        app = self.pods[name] = self.random.choice([*APPS, "none"])
        return Change(
            f"label pod {name} with app {app}",
            patch=(("pods", name, {"metadata": {"labels": {"app": app}}}),),
        )

    def add_service(self) -> Change | None:
        if len(self.services) >= MAX_SERVICES:
            return None
        name = f"s{self._count()}"
        return self._put(name, self._new_service(name), "create")

    def delete_service(self) -> Change | None:
        if len(self.services) < 2:
            return None
        name = self.random.choice(sorted(self.services))
        del self.services[name]
        return Change(f"delete Service {name}", (name,), delete=(("services", name),))

    def replace_service(self) -> Change | None:
        if not self.services:
            return None
        name = self.random.choice(sorted(self.services))
        change = self._put(name, self._new_service(name), "delete and recreate")
        return change._replace(delete=(("services", name),))

    def edit_service(self) -> Change | None:
        if not self.services:
            return None
        name = self.random.choice(sorted(self.services))
        spec: Manifest = dict(self.services[name]["spec"])
        what = self.random.choice(
            (
                "policy",
                "policy",
                "internal",
                "ports",
                "ports",
                "affinity",
                "ranges",
                "families",
                "selector",
            )
        )
        match what:
            case "policy" if spec["type"] != "ClusterIP":
                spec["externalTrafficPolicy"] = (
                    "Cluster" if spec["externalTrafficPolicy"] == "Local" else "Local"
                )
            case "internal":
                spec["internalTrafficPolicy"] = (
                    "Cluster" if spec.get("internalTrafficPolicy") == "Local" else "Local"
                )
            case "ports":
                spec["ports"] = self._ports()
            case "affinity":
                spec |= self._affinity(spec["sessionAffinity"] == "None")
            case "ranges" if spec["type"] == "LoadBalancer":
                spec["loadBalancerSourceRanges"] = self.random.choice(RANGES)
            case "families":
                both = spec["ipFamilyPolicy"] == "SingleStack"
                spec["ipFamilyPolicy"] = "RequireDualStack" if both else "SingleStack"
                first = spec["ipFamilies"][0]
                spec["ipFamilies"] = (
                    [first, "IPv6" if first == "IPv4" else "IPv4"] if both else [first]
                )
            case "selector":
                spec["selector"] = {"app": self.random.choice(APPS)}
                spec["publishNotReadyAddresses"] = self.random.random() < 0.2
            case _:
                return None
        return self._put(name, _service(name, spec), f"edit {what} of")

    def retype_service(self) -> Change | None:
        if not self.services:
            return None
        name = self.random.choice(sorted(self.services))
        spec: Manifest = dict(self.services[name]["spec"])
        for field in (
            "externalTrafficPolicy",
            "loadBalancerClass",
            "loadBalancerSourceRanges",
            "allocateLoadBalancerNodePorts",
        ):
            spec.pop(field, None)
        spec |= self._type(
            self.random.choice(
                [kind for kind in ("ClusterIP", "NodePort", "LoadBalancer") if kind != spec["type"]]
            )
        )
        return self._put(name, _service(name, spec), "change the type of")

    def exclude_node(self) -> Change:
        name = self.random.choice(NODES)
        self.excluded ^= {name}
        value = "true" if name in self.excluded else None
        patch = {"metadata": {"labels": {EXCLUDE_LABEL: value}}}
        return Change(
            f"{'exclude' if value else 'include'} {name}", patch=(("nodes", name, patch),)
        )

    def _put(self, name: str, manifest: Manifest, verb: str) -> Change:
        self.services[name] = manifest
        return Change(f"{verb} Service {name}: {manifest['spec']}", (name,), apply=(manifest,))

    def _count(self) -> int:
        self._number += 1
        return self._number

    def _forget_pod(self) -> str:
        name = self.random.choice(sorted(self.pods))
        del self.pods[name]
        self.unready.discard(name)
        return name

    def _new_pod(self) -> tuple[Manifest, str]:
        name, app, node = f"p{self._count()}", self.random.choice(APPS), self.random.choice(NODES)
        make, grace_s = self.random.randrange(2), self.random.choice((2, 2, 5))
        self.pods[name] = app
        return pod(
            name, app, node, make=make, grace_s=grace_s
        ), f"pod {name} of {app} on {node}, make {make}"

    def _new_service(self, name: str) -> Manifest:
        first = self.random.choice(("IPv4", "IPv4", "IPv6"))
        both = self.random.random() < 0.6
        families = [first, "IPv6" if first == "IPv4" else "IPv4"] if both else [first]
        spec: Manifest = {
            "selector": {"app": self.random.choice(APPS)},
            "ports": self._ports(),
            "ipFamilyPolicy": "RequireDualStack" if both else "SingleStack",
            "ipFamilies": families,
        }
        spec |= self._affinity(self.random.random() < 0.2)
        return _service(
            name,
            spec
            | self._type(self.random.choice(("LoadBalancer",) * 6 + ("NodePort", "ClusterIP"))),
        )

    def _type(self, kind: str) -> Manifest:
        fields: Manifest = {"type": kind}
        if kind != "ClusterIP":
            fields["externalTrafficPolicy"] = self.random.choice(("Local", "Local", "Cluster"))
        if kind == "LoadBalancer":
            if (
                name := self.random.choice((OUR_CLASS, OUR_CLASS, "", "", "", FOREIGN_CLASS))
            ) != "":
                fields["loadBalancerClass"] = name
            if self.random.random() < 0.2:
                fields["allocateLoadBalancerNodePorts"] = False
        return fields

    def _ports(self) -> list[Manifest]:
        chosen = self.random.sample(sorted(PORTS), self.random.choice((1, 2, 2, 3)))
        return [
            {
                "name": name,
                "port": PORTS[name][0],
                "protocol": PORTS[name][1],
                "targetPort": self.random.choice(PORTS[name][2]),
            }
            for name in sorted(chosen)
        ]

    def _affinity(self, on: bool) -> Manifest:
        return {"sessionAffinity": "ClientIP" if on else "None"}


def pod(name: str, app: str, node: str, *, make: int = 0, grace_s: int = 2) -> Manifest:
    """Return a pod that serves all port numbers. `make` determines the names of the ports."""
    ports: list[Manifest] = []
    for label, protocol, numbers in (("web", "TCP", NUMBERS[0]), ("dns", "UDP", NUMBERS[1])):
        ports.append({"name": label, "containerPort": numbers[make], "protocol": protocol})
        ports.append(
            {"name": f"other-{label}", "containerPort": numbers[1 - make], "protocol": protocol}
        )
    if make:
        ports.append({"name": "admin", "containerPort": 8081})
    spec = {
        "nodeName": node,
        "terminationGracePeriodSeconds": grace_s,
        "containers": [{"name": "echo", "image": "echo", "ports": ports}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": app}},
        "spec": spec,
    }


def _service(name: str, spec: Manifest) -> Manifest:
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}
