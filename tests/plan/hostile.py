"""Plans the objects of a hostile user, each as big as an API server accepts it, with a limit on the
CPU time of each plan.

Run as a program: it prints the name of each object before it plans it. The kernel ends the program
if a plan takes longer than LIMIT_S, for example because the time of a match is quadratic in the
length of its text. Then the last line names the object."""

import resource
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from tests.makers import plan_gateway

from fairlead.config import Config, PoolConfig
from fairlead.drivers.nodeproxy.elements import difference, elements_of
from fairlead.errors import Refused
from fairlead.kube.crds import AddressGrant, AddressPool
from fairlead.kube.objects import SOURCE_RANGES_ANNOTATION, EndpointSlice, Node, ObjectKey, Service
from fairlead.model import LoadBalancer, Outcome, ServiceKey
from fairlead.plan.annotations import MAX_VALUE_LENGTH, READ, RECORD
from fairlead.plan.classes import CLASSES
from fairlead.plan.cluster import plan_node
from fairlead.plan.ledger import Ledger
from fairlead.plan.service import CLAIM_MANAGER, CLASS_ANNOTATION
from fairlead.plan.services import plan_services
from fairlead.plan.status import MAX_MESSAGE_LENGTH, conditions_of
from fairlead.sections import OctaviaConfig
from fairlead.state import State

LIMIT_S = 10
"""CPU seconds for one object. The slowest takes about one second, most take milliseconds."""

OBJECT_BYTES = 1_500_000
"""What etcd accepts as one object."""
ANNOTATION_BYTES = 250_000
"""What an API server accepts in the annotations of one object, without their names."""

CONFIG = Config(
    default_class="fairlead.io/direct",
    pools=(PoolConfig("main", ("203.0.113.0/24",)),),
    octavia=OctaviaConfig(subnet_id="subnet"),
)
NAMES = (*sorted(READ), RECORD, CLASS_ANNOTATION, SOURCE_RANGES_ANNOTATION, "fairlead.io/unknown")
TEXTS = (
    "9",
    "1h",
    "1.",
    "a",
    "a,",
    "a=b,",
    "1.1.1.1/32,",
    "2001:db8::1,",
    ":",
    "-",
    "/",
    "(a+)+",
    "a b ",
    "\N{ARABIC-INDIC DIGIT ONE}",
    "xn--",
    "\0",
    "[",
    '{"fairlead.io/proxy-protocol":"',
)
VALID = ServiceKey("bystander", "valid")

Objects = tuple[dict[str, Any], list[dict[str, Any]]]
"""A Service and its EndpointSlices."""


def service(
    name: str, class_: str, annotations: Mapping[str, str] = {}, **metadata: object
) -> dict[str, Any]:
    """Return a claimed Service."""
    return {
        "metadata": {"name": name, "namespace": "default", "uid": name, **metadata}
        | {
            "managedFields": [{"manager": CLAIM_MANAGER}],
            "annotations": {CLASS_ANNOTATION: class_, **annotations},
        },
        "spec": {
            "type": "LoadBalancer",
            "loadBalancerClass": class_,
            "clusterIP": "10.96.0.1",
            "clusterIPs": ["10.96.0.1"],
            "externalTrafficPolicy": "Local",
            "healthCheckNodePort": 30000,
            "ports": [{"port": 80, "nodePort": 30080}],
        },
        "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.7"}]}},
    }


def endpoints(name: str, count: int, ports: int = 1, address: str = "") -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "labels": {"kubernetes.io/service-name": "hostile"},
        },
        "addressType": "IPv4",
        "endpoints": [
            {"addresses": [address or f"10.1.{i // 250}.{i % 250}"], "nodeName": f"node{i % 2000}"}
            for i in range(count)
        ],
        "ports": [{"name": f"p{i}" if ports > 1 else "", "port": 8000 + i} for i in range(ports)],
    }


def many_ports(class_: str, count: int) -> dict[str, Any]:
    made = service("hostile", class_)
    made["spec"]["ports"] = [
        {"name": f"p{i}", "port": 1 + i, "nodePort": 30000 + i % 2000} for i in range(count)
    ]
    shown = [{"port": 1 + i, "protocol": "TCP"} for i in range(count)]
    made["status"]["loadBalancer"]["ingress"] = [{"ip": "203.0.113.7", "ports": shown}]
    return made


def with_spec(class_: str, **spec: object) -> dict[str, Any]:
    made = service("hostile", class_)
    made["spec"] |= spec
    return made


def hostile_services(class_: str) -> Iterator[tuple[str, Objects]]:
    """Yield the objects, each with its name."""
    few = [endpoints("few", 1)]
    for length in (MAX_VALUE_LENGTH, ANNOTATION_BYTES):
        for name in NAMES:
            # A value that is too long is refused before anything reads it, whatever it contains.
            for text in TEXTS if length == MAX_VALUE_LENGTH else TEXTS[:2]:
                value = (text * length)[: length - 1] + "x"
                what = f"{length} characters like {text!r} in {name}"
                yield what, (service("hostile", class_, annotations={name: value}), few)
        for text in ("9" * length, "9" * (length - 1) + "x"):
            record = msgspec.json.encode(dict.fromkeys(NAMES, text[: length // 50])).decode()
            wrong = dict.fromkeys(READ, "?!") | {RECORD: record}
            yield f"record of {text[-1]!r}", (service("hostile", class_, annotations=wrong), few)
    every = dict.fromkeys(NAMES, "9" * MAX_VALUE_LENGTH)
    yield "every annotation", (service("hostile", class_, annotations=every), few)
    for prefix in ("fairlead.io/", "loadbalancer.openstack.org/", "example.com/"):
        unknown = {f"{prefix}drain-timeou{i:04}": "x" * 20 for i in range(5000)}
        yield f"annotations {prefix}", (service("hostile", class_, annotations=unknown), few)
    yield "a version", (service("hostile", class_, resourceVersion="9" * 5000), few)
    labels = {f"label{i:05}": "x" * 63 for i in range(4000)}
    yield "labels", (service("hostile", class_, labels=labels), few)
    for text in TEXTS:
        value = (text * OBJECT_BYTES)[:OBJECT_BYTES]
        yield f"loadBalancerIP {text!r}", (with_spec(class_, loadBalancerIP=value), few)
    for count in (10_000, 80_000):
        ranges = [f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}/32" for i in range(count)]
        yield f"{count} ranges", (with_spec(class_, loadBalancerSourceRanges=ranges), few)
    ips = [f"192.{i >> 16}.{i >> 8 & 255}.{i & 255}" for i in range(80_000)]
    yield "external IPs", (with_spec(class_, externalIPs=ips), few)
    for count, ips_count, endpoint_count in ((100, 1_900, 1), (10, 2_000, 1_000), (10, 1_999, 9)):
        made = many_ports(class_, count)
        made["spec"]["externalIPs"] = ips[:ips_count]
        found = [endpoints("a", endpoint_count, count)]
        yield f"{count} ports, {ips_count} IPs, {endpoint_count} endpoints", (made, found)
    made = many_ports(class_, 2_000)
    made["spec"]["loadBalancerSourceRanges"] = ranges[:10_000]
    yield "2000 ports with ranges", (made, few)
    for count in (2_000, 20_000):
        yield f"{count} ports", (many_ports(class_, count), [endpoints("p", 1, min(count, 20_000))])
    slices = [endpoints(f"s{i}", 1000) for i in range(100)]
    yield "100,000 endpoints", (service("hostile", class_), slices)
    slices = [endpoints(f"s{i}", 1000, 10) for i in range(24)]
    yield "10 ports of 24,000 endpoints", (many_ports(class_, 10), slices)
    slices = [endpoints(f"s{i}", 1000, 100) for i in range(20)]
    yield "100 ports of 20,000 endpoints", (many_ports(class_, 100), slices)
    slices = [endpoints(f"s{i}", 0, 1) for i in range(5000)]
    yield "5,000 slices", (many_ports(class_, 2000), slices)
    slices = [endpoints(f"s{i}", 1000, 1, "9" * 1000 + ".1.1.1") for i in range(10)]
    yield "long addresses", (service("hostile", class_), slices)


def hostile_pools() -> Iterator[tuple[str, list[AddressPool], AddressGrant]]:
    """Yield AddressPools and AddressGrants, which are not all validated by an old CRD."""
    for text in TEXTS:
        addresses = [(text * 80_000)[:80_000]] * 10
        yield f"pool with {text!r}", [pool("a", addresses)], grant("9")
    addresses = [f"10.{i >> 8}.{i & 255}.0/30" for i in range(10_000)]
    yield "ranges of a pool", [pool("a", addresses)], grant("9")
    pools = [pool(f"p{i}", addresses[i * 100 : i * 100 + 100]) for i in range(100)]
    yield "pools", pools, grant("9")
    yield "a version of a grant", [], grant("9" * 5000)


def pool(name: str, addresses: list[str]) -> AddressPool:
    return msgspec.convert(
        {"metadata": {"name": name}, "spec": {"addresses": addresses}}, AddressPool
    )


def grant(version: str) -> AddressGrant:
    holder = {
        "namespace": "default",
        "name": "hostile",
        "uid": "hostile",
        "serviceVersion": version,
    }
    return msgspec.convert(
        {
            "metadata": {"name": "203.0.113.7"},
            "spec": {"address": "203.0.113.7", "holders": [holder]},
        },
        AddressGrant,
    )


def plan(state: State) -> None:
    """Plan all Services in every role."""
    planned = plan_services(state, CONFIG, Ledger(), state.services)
    assert isinstance(planned[VALID], LoadBalancer)
    for each in planned.values():
        intent, outcome = (
            (None, Outcome("refused", str(each)))
            if isinstance(each, Refused)
            else (each, Outcome("done"))
        )
        for condition in conditions_of(intent, outcome, ()):
            assert len(condition.message) <= MAX_MESSAGE_LENGTH
    at_gateway = plan_gateway(state, CONFIG, state.services)
    assert isinstance(at_gateway[VALID], LoadBalancer)
    at_node = plan_node(state, "node1", state.services)
    specs = {
        key: elements_of(each, ["198.18.0.1"])
        for key, each in at_node.items()
        if not isinstance(each, Refused)
    }
    assert VALID in specs
    assert difference(specs, {})


def main() -> None:
    state = State(())
    state.update_nodes(NODES)
    for name, pools, one in hostile_pools():
        replace(state, service("hostile", "fairlead.io/direct"), [])
        state.update_pools({ObjectKey("", each.metadata.name): each for each in pools})
        state.update_grants({ObjectKey("", "203.0.113.7"): one})
        _limited(name, state)
        state.update_pools({ObjectKey("", each.metadata.name): None for each in pools})
        state.update_grants({ObjectKey("", "203.0.113.7"): None})
    for class_ in CLASSES:
        for name, (hostile, slices) in hostile_services(class_):
            replace(state, hostile, slices)
            _limited(f"{class_}: {name}", state)


def replace(state: State, hostile: Mapping[str, Any], slices: list[dict[str, Any]]) -> None:
    """Replace all Services by a valid one and the hostile one, and all slices by these. The nodes
    stay: reading them takes longer than most plans."""
    valid = service(VALID.name, "fairlead.io/direct")
    valid["metadata"]["namespace"] = VALID.namespace
    valid["status"] = {"loadBalancer": {"ingress": [{"ip": "203.0.113.8"}]}}
    made = msgspec.convert([valid, hostile], list[Service])
    former_services = {ObjectKey(*key): None for key in state.services}
    state.update_services(former_services | {ObjectKey(*each.key): each for each in made})
    found = msgspec.convert(slices, list[EndpointSlice])
    former_slices = {
        ObjectKey("default", each.metadata.name): None
        for key in former_services
        for each in state.slices_of(ServiceKey(*key))
    }
    state.update_slices(
        former_slices | {ObjectKey("default", each.metadata.name): each for each in found}
    )


NODES = {
    ObjectKey("", f"node{i}"): msgspec.convert(
        {
            "metadata": {"name": f"node{i}"},
            "spec": {"podCIDRs": [f"10.{i >> 8}.{i & 255}.0/24"]},
            "status": {
                "addresses": [{"type": "InternalIP", "address": f"198.18.{i >> 8}.{i & 255}"}]
            },
        },
        Node,
    )
    for i in range(2000)
}


def _limited(name: str, state: State) -> None:
    print(name.encode("unicode_escape").decode(), flush=True)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, highest = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(used.ru_utime + used.ru_stime) + LIMIT_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, highest))
    plan(state)


if __name__ == "__main__":
    main()
