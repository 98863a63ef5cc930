"""Real packets through the rules of a node, in the cases of kube-proxy's own packet tests, for both
address families. Comments name the upstream test from which the cases are taken."""

from collections import Counter
from typing import NamedTuple

import msgspec
import pytest
from tests.drivers.nodeproxy.conftest import (
    CLUSTER4,
    CLUSTER6,
    EXTERNAL4,
    EXTERNAL6,
    GATEWAYS,
    NODE4,
    NODE6,
    NODE_PORT,
    POD_CIDRS,
    REFUSED,
    SILENT,
    VIP4,
    VIP6,
    Seen,
    Site,
    backends,
    callers,
    install,
    port,
    service,
)

from fairlead.drivers.nodeproxy import NodeProxyDriver
from fairlead.model import NodeServicePort

pytestmark = pytest.mark.root

FAMILIES = ("IPv4", "IPv6")
BOTH = frozenset({"local1", "remote1"})
HERE = frozenset({"local1"})
SOURCE_NAMES = {
    "caller": "pod",
    "local1": "endpoint",
    "node": "node",
    "client": "client",
    "blocked": "client outside of the source ranges",
}
TARGET_NAMES = {
    "cluster": "ClusterIP",
    "balancer": "load-balancer address",
    "external": "externalIP",
    "node": "NodePort",
}
RANGES = ("192.168.0.0/24", " 203.0.113.0/25", "2001:db8::/64", "2001:db8:c::/64")


class Row(NamedTuple):
    """A call and its expected result: the set of pods that may answer (all must, in time), or
    REFUSED or SILENT."""

    source: str
    target: str
    outcome: frozenset[str] | str
    masqueraded: bool = False

    @property
    def name(self) -> str:
        return f"{SOURCE_NAMES[self.source]} to {TARGET_NAMES[self.target]}"


def destination(target: str, family: str) -> tuple[str, int]:
    four = family == "IPv4"
    return {
        "cluster": (CLUSTER4 if four else CLUSTER6, 80),
        "balancer": (VIP4 if four else VIP6, 80),
        "external": (EXTERNAL4 if four else EXTERNAL6, 80),
        "node": (NODE4 if four else NODE6, NODE_PORT),
    }[target]


def check(site: Site, row: Row, family: str, *, protocol: str = "TCP") -> None:
    """Call until each expected pod has answered. No other pod may answer, and each must see the
    right source address."""
    address, number = destination(row.target, family)
    if isinstance(row.outcome, str):
        timeout_s = 1.0 if row.outcome == SILENT else 10.0
        assert (
            site.call(row.source, address, number, protocol=protocol, timeout_s=timeout_s)
            == row.outcome
        ), row.name
        return
    answered: set[str] = set()
    peers: set[str] = set()
    for _ in range(40):  # two pods are missed once in 2^39 runs
        seen = site.call(row.source, address, number, protocol=protocol)
        assert isinstance(seen, Seen), (row.name, seen)
        answered.add(seen.pod)
        peers.add(seen.peer)
        if answered >= row.outcome:
            break
    assert answered == row.outcome, row.name
    expected = (
        (NODE4 if family == "IPv4" else NODE6) if row.masqueraded else callers(family)(row.source)
    )
    assert peers == {expected}, row.name


def ids(rows: tuple[Row, ...]) -> list[str]:
    return [row.name for row in rows]


# TestNoEndpointsReject
NO_ENDPOINTS = (
    Row("caller", "cluster", REFUSED),
    Row("client", "external", REFUSED),
    Row("caller", "node", REFUSED),
    Row("client", "node", REFUSED),
    Row("caller", "balancer", REFUSED),
    Row("client", "balancer", REFUSED),
    Row("node", "cluster", REFUSED),
    Row("node", "node", REFUSED),
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("protocol", ["TCP", "UDP", "SCTP"])
@pytest.mark.parametrize("policy", ["Cluster", "Local"])
async def test_without_endpoints_every_call_is_refused(
    site: Site, driver: NodeProxyDriver, family: str, protocol: str, policy: str
) -> None:
    await install(driver, service(port((), family=family, protocol=protocol), external=policy))
    for row in NO_ENDPOINTS:
        check(site, row, family, protocol=protocol)


@pytest.mark.parametrize("family", FAMILIES)
async def test_cluster_ips_are_served_by_port_and_protocol(
    site: Site, driver: NodeProxyDriver, family: str
) -> None:
    """TestClusterIPGeneral: separate protocols and ports, target ports, hairpin, and an address
    without a Service."""
    first, second, unused = (
        ("172.30.0.41", "172.30.0.42", "172.30.0.50")
        if family == "IPv4"
        else ("2001:db8:30::41", "2001:db8:30::42", "2001:db8:30::50")
    )

    def inside(
        address: str, number: int, target: int, *pods: str, protocol: str = "TCP"
    ) -> NodeServicePort:
        chosen = backends(*pods, family=family, port=target)
        return msgspec.structs.replace(
            port(
                chosen,
                number=number,
                family=family,
                cluster_ip=address,
                node_port=0,
                balancers=(),
                protocol=protocol,
            ),
            external_ips=(),
        )

    await install(
        driver,
        service(inside(first, 80, 8080, "local1"), name="svc1"),
        service(
            inside(second, 80, 8080, "local1", "remote1"),
            inside(second, 443, 8443, "local1", "remote1"),
            inside(second, 53, 8443, "local1", "remote1"),
            inside(second, 53, 5353, "local1", "remote1", protocol="UDP"),
            inside(second, 53, 53, "local1", "remote1", protocol="SCTP"),
            name="svc2",
        ),
    )
    address_of = callers(family)
    assert site.call("caller", first, 80) == Seen("local1", address_of("caller"))
    assert site.call("local1", first, 80) == Seen("local1", address_of("node"))
    for number, protocol in ((80, "TCP"), (443, "TCP"), (53, "TCP"), (53, "UDP"), (53, "SCTP")):
        seen = {site.call("caller", second, number, protocol=protocol) for _ in range(40)}
        assert seen == {Seen(pod, address_of("caller")) for pod in BOTH}
    for protocol in ("UDP", "SCTP"):
        assert site.call("caller", second, 80, protocol=protocol) == REFUSED
    assert site.call("caller", first, 443) == REFUSED
    assert site.call("caller", unused, 80, timeout_s=1.0) == SILENT


# TestLoadBalancer. Source ranges apply to load-balancer addresses only.
SOURCE_RANGES = (
    Row("caller", "cluster", HERE),
    Row("client", "node", HERE, True),
    Row("blocked", "node", HERE, True),
    Row("client", "balancer", HERE, True),
    Row("blocked", "balancer", SILENT),
    Row("caller", "balancer", SILENT),
    Row("node", "balancer", HERE, True),
    Row("blocked", "external", HERE, True),
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("row", SOURCE_RANGES, ids=ids(SOURCE_RANGES))
async def test_source_ranges_apply_to_load_balancer_addresses_only(
    site: Site, driver: NodeProxyDriver, family: str, row: Row
) -> None:
    await install(
        driver,
        service(port(backends("local1", family=family), family=family), source_ranges=RANGES),
    )
    check(site, row, family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("source_address", ["target address", "other address of the Service"])
async def test_a_node_with_an_address_of_the_service_may_call_it(
    site: Site, driver: NodeProxyDriver, source_address: str, family: str
) -> None:
    """TestLoadBalancer: the source is a load-balancer address of the Service. No source range
    contains it, but it is allowed because a range contains the node."""
    address, number = destination("balancer", family)
    length, other = (32, "198.51.100.11") if family == "IPv4" else (128, "2001:db8:f::11")
    source = address if source_address == "target address" else other
    served = port(backends("local1", family=family), family=family, balancers=(address, other))
    await install(driver, service(served, source_ranges=RANGES))
    site.ip("node", f"address add {source}/{length} dev lo{' nodad' if family == 'IPv6' else ''}")
    try:
        seen = site.call("node", address, number, source=source, timeout_s=5.0)
    finally:
        site.ip("node", f"address del {source}/{length} dev lo")
    # Masquerading on a link without an address uses any address of the node.
    assert seen in (Seen("local1", callers(family)("node")), Seen("local1", source))


# TestExternalTrafficPolicyLocal
EXTERNAL_LOCAL = (
    Row("caller", "cluster", BOTH),
    Row("caller", "external", BOTH),
    Row("client", "external", HERE),
    Row("caller", "balancer", BOTH),
    Row("client", "balancer", HERE),
    Row("caller", "node", BOTH),
    Row("client", "node", HERE),
)

# TestExternalTrafficPolicyCluster
EXTERNAL_CLUSTER = (
    Row("caller", "cluster", BOTH),
    Row("caller", "external", BOTH, True),
    Row("client", "external", BOTH, True),
    Row("caller", "balancer", BOTH, True),
    Row("client", "balancer", BOTH, True),
    Row("caller", "node", BOTH, True),
    Row("client", "node", BOTH, True),
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("protocol", ["TCP", "UDP", "SCTP"])
@pytest.mark.parametrize(
    ("policy", "rows"), [("Local", EXTERNAL_LOCAL), ("Cluster", EXTERNAL_CLUSTER)]
)
async def test_the_external_traffic_policy_applies_to_clients_outside(
    site: Site,
    driver: NodeProxyDriver,
    family: str,
    protocol: str,
    policy: str,
    rows: tuple[Row, ...],
) -> None:
    target = 8080 if protocol == "TCP" else 5353
    chosen = backends("local1", "remote1", family=family, port=target)
    await install(driver, service(port(chosen, family=family, protocol=protocol), external=policy))
    for row in rows:
        check(site, row, family, protocol=protocol)


# TestInternalExternalMasquerade, by internal and external traffic policy
MATRIX = {
    ("Cluster", "Cluster"): (
        Row("caller", "cluster", BOTH),
        Row("caller", "node", BOTH, True),
        Row("caller", "balancer", BOTH, True),
        Row("node", "cluster", BOTH, True),
        Row("node", "node", BOTH, True),
        Row("node", "balancer", BOTH, True),
        Row("client", "cluster", BOTH, True),
        Row("client", "node", BOTH, True),
        Row("client", "balancer", BOTH, True),
    ),
    ("Cluster", "Local"): (
        Row("caller", "cluster", BOTH),
        Row("caller", "node", BOTH),
        Row("caller", "balancer", BOTH),
        Row("node", "cluster", BOTH, True),
        Row("node", "node", BOTH, True),
        Row("node", "balancer", BOTH, True),
        Row("client", "cluster", BOTH, True),
        Row("client", "node", HERE),
        Row("client", "balancer", HERE),
    ),
    ("Local", "Cluster"): (
        Row("caller", "cluster", HERE),
        Row("caller", "node", BOTH, True),
        Row("caller", "balancer", BOTH, True),
        Row("node", "cluster", HERE, True),
        Row("node", "node", BOTH, True),
        Row("node", "balancer", BOTH, True),
        Row("client", "cluster", HERE, True),
        Row("client", "node", BOTH, True),
        Row("client", "balancer", BOTH, True),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "policies", MATRIX, ids=lambda policies: f"internal {policies[0]}, external {policies[1]}"
)
async def test_policies_determine_the_pods_and_the_source_address(
    site: Site, driver: NodeProxyDriver, family: str, policies: tuple[str, str]
) -> None:
    internal, external = policies
    both = backends("local1", "remote1", family=family)
    await install(driver, service(port(both, family=family), internal=internal, external=external))
    for row in MATRIX[policies]:
        check(site, row, family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "policies", MATRIX, ids=lambda policies: f"internal {policies[0]}, external {policies[1]}"
)
async def test_policies_with_pods_recognized_by_their_interfaces(
    site: Site, at_node: None, family: str, policies: tuple[str, str]
) -> None:
    """The same scenarios with one interface selected by its name, like a bridge, and others by a
    prefix of their names."""
    driver = NodeProxyDriver(
        node_addresses=lambda: (NODE4, NODE6), pod_cidrs=(), pod_interfaces=("vcaller", "vlocal*")
    )
    await driver.open()
    try:
        internal, external = policies
        both = backends("local1", "remote1", family=family)
        await install(
            driver, service(port(both, family=family), internal=internal, external=external)
        )
        for row in MATRIX[policies]:
            check(site, row, family)
    finally:
        await driver.close(remove=True)


async def test_node_ports_answer_only_at_the_configured_addresses(
    site: Site, at_node: None
) -> None:
    """TestNodePorts: a secondary address of the node, with and without configuration."""
    chosen, other = [NODE4], "192.168.1.2"
    driver = NodeProxyDriver(
        node_addresses=lambda: (NODE4, NODE6),
        pod_cidrs=POD_CIDRS,
        node_port_addresses=lambda: tuple(chosen),
    )
    await driver.open()
    try:
        web = service(port(backends("local1", "remote1")))
        await install(driver, web)
        assert isinstance(site.call("client", NODE4, NODE_PORT), Seen)
        site.ip("router", f"route add {other} via {NODE4}")
        assert (
            site.call("client", other, NODE_PORT) == REFUSED
        )  # the host itself refuses: no rule applies
        chosen[:] = [other]
        await install(driver, web)
        assert isinstance(site.call("client", other, NODE_PORT), Seen)
        assert site.call("client", NODE4, NODE_PORT) == REFUSED
    finally:
        site.ip("router", f"route del {other}")
        await driver.close(remove=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recognized_by", ["networks", "interfaces"])
async def test_a_pod_that_calls_a_node_port_at_its_gateway_reaches_every_endpoint(
    site: Site, at_node: None, recognized_by: str, family: str
) -> None:
    """This holds with policy Local too. A pod of another node counts as an external client at every
    address of the node."""
    gateways = GATEWAYS[family] if recognized_by == "interfaces" else GATEWAYS[family][:1]
    driver = NodeProxyDriver(
        node_addresses=lambda: (NODE4, NODE6),
        pod_cidrs=POD_CIDRS,
        pod_interfaces=("vcaller", "vlocal*") if recognized_by == "interfaces" else (),
        node_port_addresses=lambda: (NODE4, NODE6, *gateways),
    )
    await driver.open()
    try:
        remote1 = backends("remote1", family=family)
        await install(driver, service(port(remote1, family=family), external="Local"))
        address_of = callers(family)
        for gateway in gateways:
            assert site.call("caller", gateway, NODE_PORT) == Seen("remote1", address_of("caller"))
        assert site.call("remote1", address_of("node"), NODE_PORT, timeout_s=0.5) == SILENT
        both = backends("local1", "remote1", family=family)
        await install(driver, service(port(both, family=family), external="Local"))
        for _ in range(8):
            assert site.call("remote1", address_of("node"), NODE_PORT) == Seen(
                "local1", address_of("remote1")
            )
    finally:
        await driver.close(remove=True)


UNDETECTED = (
    # The pod sees the node's address, with or without masquerading.
    Row("node", "cluster", BOTH, True),
    Row("client", "cluster", BOTH),
    Row("caller", "node", HERE),
    Row("caller", "balancer", HERE),
)


@pytest.mark.parametrize("family", FAMILIES)
async def test_policies_with_pods_not_distinguished_from_other_clients(
    site: Site, at_node: None, family: str
) -> None:
    """TestInternalExternalMasquerade without a local detector."""
    driver = NodeProxyDriver(node_addresses=lambda: (NODE4, NODE6), pod_cidrs=())
    await driver.open()
    try:
        local1 = backends("local1", family=family)
        both = port(backends("local1", "remote1", family=family), family=family)
        await install(driver, service(both, external="Local"))
        check(site, UNDETECTED[0], family)
        for row in UNDETECTED[2:]:
            check(site, row, family)
        # The answer to a client without masquerading must pass this node, so only local endpoints.
        await install(driver, service(port(local1, family=family), external="Local"))
        check(site, UNDETECTED[1]._replace(outcome=HERE), family)
    finally:
        await driver.close(remove=True)


# TestInternalTrafficPolicy
INTERNAL = (
    ("Cluster: every pod", "Cluster", ("local1",), ("remote1",), frozenset({"local1", "remote1"})),
    ("Local: the pod of the node", "Local", ("local1",), ("remote1",), frozenset({"local1"})),
    (
        "Local: all pods of the node",
        "Local",
        ("local1", "local2"),
        ("remote1",),
        frozenset({"local1", "local2"}),
    ),
    ("Local without pods on the node: silence", "Local", (), ("remote1",), SILENT),
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", INTERNAL, ids=[case[0] for case in INTERNAL])
async def test_the_internal_traffic_policy_applies_to_cluster_ips(
    site: Site,
    driver: NodeProxyDriver,
    family: str,
    case: tuple[str, str, tuple[str, ...], tuple[str, ...], frozenset[str] | str],
) -> None:
    _, policy, local, remote, outcome = case
    await install(
        driver,
        service(port(backends(*local, *remote, family=family), family=family), internal=policy),
    )
    check(site, Row("caller", "cluster", outcome), family)
    await install(driver, service(port((), family=family), internal=policy))
    check(site, Row("caller", "cluster", REFUSED), family)


@pytest.mark.parametrize("family", FAMILIES)
async def test_policy_local_without_local_endpoints_drops_clients_outside_and_serves_pods_and_nodes(
    site: Site, driver: NodeProxyDriver, family: str
) -> None:
    await install(
        driver, service(port(backends("remote1", family=family), family=family), external="Local")
    )
    remote = frozenset({"remote1"})
    for target in ("balancer", "node", "external"):
        check(site, Row("client", target, SILENT), family)
        check(site, Row("caller", target, remote), family)
        check(site, Row("node", target, remote, True), family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["Cluster", "Local"])
@pytest.mark.parametrize("target", ["cluster", "balancer", "node", "external"])
async def test_a_pod_reaches_itself(
    site: Site, driver: NodeProxyDriver, family: str, policy: str, target: str
) -> None:
    await install(
        driver, service(port(backends("local1", family=family), family=family), external=policy)
    )
    check(site, Row("local1", target, HERE, True), family)


async def test_node_ports_answer_only_at_the_primary_address(
    site: Site, driver: NodeProxyDriver
) -> None:
    """TestNodePorts: NodePorts are not served at a secondary address and at the loopback address,
    and no process listens there."""
    await install(driver, service(port(backends("local1"))))
    assert site.call("node", "127.0.0.1", NODE_PORT) == REFUSED
    assert site.call("caller", "192.168.1.2", NODE_PORT) == REFUSED
    assert site.call("node", NODE4, NODE_PORT) == Seen("local1", NODE4)


async def test_packets_for_an_address_with_ip_mode_proxy_leave_the_node(
    site: Site, driver: NodeProxyDriver
) -> None:
    """An ingress address that is not in the plan is not served by the node; here the router
    answers for it."""
    address = "198.51.100.66"
    site.ip("router", f"address add {address}/32 dev lo")
    try:
        await install(driver, service(port(backends("local1"), balancers=(VIP4,))))
        assert site.call("caller", VIP4, 80) == Seen("local1", NODE4)
        assert (
            site.call("caller", address, 80) == REFUSED
        )  # the router refuses, because it has no server
        with site.listening("router", address, 80):
            assert site.call("caller", address, 80) == Seen("router", callers("IPv4")("caller"))
    finally:
        site.ip("router", f"address del {address}/32 dev lo")


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_endpoint_is_equally_likely(
    site: Site, driver: NodeProxyDriver, family: str
) -> None:
    chosen = backends("local1", "local2", "remote1", family=family, port=5353)
    await install(driver, service(port(chosen, family=family, protocol="UDP")))
    address, number = destination("cluster", family)
    answers = Counter(
        str(site.call("caller", address, number, protocol="UDP")[0]) for _ in range(600)
    )
    assert sum(answers.values()) == 600
    squares = sum((answers[pod] - 200) ** 2 / 200 for pod in ("local1", "local2", "remote1"))
    assert squares < 27.6, (
        answers
    )  # chi-squared, two degrees of freedom: one run in a million is worse
