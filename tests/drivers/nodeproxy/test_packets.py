"""The treatment of packets on a node, by kube-proxy's own tables of scenarios (P1 to P11): real
packets, both families."""

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
RANGES = ("192.168.0.0/24", " 203.0.113.0/25", "2001:db8::/64", "2001:db8:c::/64")


class Row(NamedTuple):
    """A call and its expected result: the set of pods that may answer (all must, in time), or
    REFUSED or SILENT."""

    id: str
    source: str
    target: str
    outcome: frozenset[str] | str
    masqueraded: bool = False


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
        )
        return
    answered: set[str] = set()
    peers: set[str] = set()
    for _ in range(40):  # two pods are missed once in 2^39 runs
        seen = site.call(row.source, address, number, protocol=protocol)
        assert isinstance(seen, Seen), seen
        answered.add(seen.pod)
        peers.add(seen.peer)
        if answered >= row.outcome:
            break
    assert answered == row.outcome
    expected = (
        (NODE4 if family == "IPv4" else NODE6) if row.masqueraded else callers(family)(row.source)
    )
    assert peers == {expected}


def ids(rows: tuple[Row, ...]) -> list[str]:
    return [row.id for row in rows]


NO_ENDPOINTS = (
    Row("P1.1", "caller", "cluster", REFUSED),
    Row("P1.2", "client", "external", REFUSED),
    Row("P1.3", "caller", "node", REFUSED),
    Row("P1.4", "client", "node", REFUSED),
    Row("P1.5", "caller", "balancer", REFUSED),
    Row("P1.6", "client", "balancer", REFUSED),
    Row("node to cluster IP", "node", "cluster", REFUSED),
    Row("node to NodePort", "node", "node", REFUSED),
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
async def test_cluster_ip(site: Site, driver: NodeProxyDriver, family: str) -> None:
    """P2.1 to P2.10: separate protocols and ports, target ports, hairpin, addresses without a
    Service."""
    first, second, nobody = (
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
    assert site.call("caller", nobody, 80, timeout_s=1.0) == SILENT


SOURCE_RANGES = (
    Row("P3.1", "caller", "cluster", HERE),
    Row("P3.2", "client", "node", HERE, True),
    Row("P3.3", "blocked", "node", HERE, True),
    Row("P3.4", "client", "balancer", HERE, True),
    Row("P3.6", "blocked", "balancer", SILENT),
    Row("P3.8", "caller", "balancer", SILENT),
    Row("P3.10", "node", "balancer", HERE, True),
    Row("externalIPs know no source ranges", "blocked", "external", HERE, True),
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("row", SOURCE_RANGES, ids=ids(SOURCE_RANGES))
async def test_source_ranges(site: Site, driver: NodeProxyDriver, family: str, row: Row) -> None:
    await install(
        driver,
        service(port(backends("local1", family=family), family=family), source_ranges=RANGES),
    )
    check(site, row, family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("borne", ["the address", "another one"])
async def test_a_node_that_bears_an_address_of_the_service_may_call_it(
    site: Site, driver: NodeProxyDriver, borne: str, family: str
) -> None:
    """P3.12: the source is a load-balancer address of the Service. It is in no source range, but
    allowed because the node is."""
    address, number = destination("balancer", family)
    length, other = (32, "198.51.100.11") if family == "IPv4" else (128, "2001:db8:f::11")
    source = address if borne == "the address" else other
    served = port(backends("local1", family=family), family=family, balancers=(address, other))
    await install(driver, service(served, source_ranges=RANGES))
    site.ip("node", f"address add {source}/{length} dev lo{' nodad' if family == 'IPv6' else ''}")
    try:
        seen = site.call("node", address, number, source=source, timeout_s=5.0)
    finally:
        site.ip("node", f"address del {source}/{length} dev lo")
    # Masquerading on a link without an address uses any address of the node.
    assert seen in (Seen("local1", callers(family)("node")), Seen("local1", source))


EXTERNAL_LOCAL = (
    Row("P5.1", "caller", "cluster", BOTH),
    Row("P5.2", "caller", "external", BOTH),
    Row("P5.3", "client", "external", HERE),
    Row("P5.4", "caller", "balancer", BOTH),
    Row("P5.5", "client", "balancer", HERE),
    Row("P5.6", "caller", "node", BOTH),
    Row("P5.7", "client", "node", HERE),
)

EXTERNAL_CLUSTER = (
    Row("P6.1", "caller", "cluster", BOTH),
    Row("P6.2", "caller", "external", BOTH, True),
    Row("P6.3", "client", "external", BOTH, True),
    Row("P6.4", "caller", "balancer", BOTH, True),
    Row("P6.5", "client", "balancer", BOTH, True),
    Row("P6.6", "caller", "node", BOTH, True),
    Row("P6.7", "client", "node", BOTH, True),
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("protocol", ["TCP", "UDP", "SCTP"])
@pytest.mark.parametrize(
    ("policy", "rows"), [("Local", EXTERNAL_LOCAL), ("Cluster", EXTERNAL_CLUSTER)]
)
async def test_external_policy(
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


MATRIX = {
    ("Cluster", "Cluster"): (
        Row("P7.1", "caller", "cluster", BOTH),
        Row("P7.4", "caller", "node", BOTH, True),
        Row("P7.7", "caller", "balancer", BOTH, True),
        Row("P7.10", "node", "cluster", BOTH, True),
        Row("P7.13", "node", "node", BOTH, True),
        Row("P7.16", "node", "balancer", BOTH, True),
        Row("P7.19", "client", "cluster", BOTH, True),
        Row("P7.22", "client", "node", BOTH, True),
        Row("P7.25", "client", "balancer", BOTH, True),
    ),
    ("Cluster", "Local"): (
        Row("P7.2", "caller", "cluster", BOTH),
        Row("P7.5", "caller", "node", BOTH),
        Row("P7.8", "caller", "balancer", BOTH),
        Row("P7.11", "node", "cluster", BOTH, True),
        Row("P7.14", "node", "node", BOTH, True),
        Row("P7.17", "node", "balancer", BOTH, True),
        Row("P7.20", "client", "cluster", BOTH, True),
        Row("P7.23", "client", "node", HERE),
        Row("P7.26", "client", "balancer", HERE),
    ),
    ("Local", "Cluster"): (
        Row("P7.3", "caller", "cluster", HERE),
        Row("P7.6", "caller", "node", BOTH, True),
        Row("P7.9", "caller", "balancer", BOTH, True),
        Row("P7.12", "node", "cluster", HERE, True),
        Row("P7.15", "node", "node", BOTH, True),
        Row("P7.18", "node", "balancer", BOTH, True),
        Row("P7.21", "client", "cluster", HERE, True),
        Row("P7.24", "client", "node", BOTH, True),
        Row("P7.27", "client", "balancer", BOTH, True),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "policies", MATRIX, ids=lambda policies: f"internal {policies[0]}, external {policies[1]}"
)
async def test_every_policy_from_everywhere(
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
async def test_where_pods_are_told_by_their_interfaces(
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


async def test_node_ports_at_chosen_addresses(site: Site, at_node: None) -> None:
    """P4.4 and P4.5: another address of the node."""
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
@pytest.mark.parametrize("told_by", ["networks", "interfaces"])
async def test_a_pod_that_calls_a_node_port_at_its_gateway_reaches_every_endpoint(
    site: Site, at_node: None, told_by: str, family: str
) -> None:
    """This holds with policy Local too. A pod of another node counts as an external client at every
    address of the node."""
    gateways = GATEWAYS[family] if told_by == "interfaces" else GATEWAYS[family][:1]
    driver = NodeProxyDriver(
        node_addresses=lambda: (NODE4, NODE6),
        pod_cidrs=POD_CIDRS,
        pod_interfaces=("vcaller", "vlocal*") if told_by == "interfaces" else (),
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


UNTOLD = (
    Row(
        "node to cluster IP", "node", "cluster", BOTH, True
    ),  # the node's own address, with or without masquerading
    Row("client to cluster IP", "client", "cluster", BOTH),
    Row("pod to NodePort", "caller", "node", HERE),
    Row("pod to balancer", "caller", "balancer", HERE),
)


@pytest.mark.parametrize("family", FAMILIES)
async def test_where_pods_cannot_be_told_from_others(
    site: Site, at_node: None, family: str
) -> None:
    """P7 without a local detector."""
    driver = NodeProxyDriver(node_addresses=lambda: (NODE4, NODE6), pod_cidrs=())
    await driver.open()
    try:
        local1 = backends("local1", family=family)
        both = port(backends("local1", "remote1", family=family), family=family)
        await install(driver, service(both, external="Local"))
        check(site, UNTOLD[0], family)
        for row in UNTOLD[2:]:
            check(site, row, family)
        # The answer to a client without masquerading must pass this node, so only local endpoints.
        await install(driver, service(port(local1, family=family), external="Local"))
        check(site, UNTOLD[1]._replace(outcome=HERE), family)
    finally:
        await driver.close(remove=True)


INTERNAL = (
    ("P10.1", "Cluster", ("local1",), ("remote1",), frozenset({"local1", "remote1"})),
    ("P10.2", "Local", ("local1",), ("remote1",), frozenset({"local1"})),
    ("P10.3", "Local", ("local1", "local2"), ("remote1",), frozenset({"local1", "local2"})),
    ("P10.4", "Local", (), ("remote1",), SILENT),
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", INTERNAL, ids=[case[0] for case in INTERNAL])
async def test_internal_policy(
    site: Site,
    driver: NodeProxyDriver,
    family: str,
    case: tuple[str, str, tuple[str, ...], tuple[str, ...], frozenset[str] | str],
) -> None:
    name, policy, local, remote, outcome = case
    await install(
        driver,
        service(port(backends(*local, *remote, family=family), family=family), internal=policy),
    )
    check(site, Row(name, "caller", "cluster", outcome), family)
    await install(driver, service(port((), family=family), internal=policy))
    check(site, Row(name, "caller", "cluster", REFUSED), family)


@pytest.mark.parametrize("family", FAMILIES)
async def test_local_without_local_endpoints_is_silent_outside_and_served_inside(
    site: Site, driver: NodeProxyDriver, family: str
) -> None:
    await install(
        driver, service(port(backends("remote1", family=family), family=family), external="Local")
    )
    remote = frozenset({"remote1"})
    for target in ("balancer", "node", "external"):
        check(site, Row("outside", "client", target, SILENT), family)
        check(site, Row("pod", "caller", target, remote), family)
        check(site, Row("node", "node", target, remote, True), family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["Cluster", "Local"])
@pytest.mark.parametrize("target", ["cluster", "balancer", "node", "external"])
async def test_a_pod_reaches_itself(
    site: Site, driver: NodeProxyDriver, family: str, policy: str, target: str
) -> None:
    await install(
        driver, service(port(backends("local1", family=family), family=family), external=policy)
    )
    check(site, Row("hairpin", "local1", target, HERE, True), family)


async def test_node_ports_answer_on_the_primary_address_alone(
    site: Site, driver: NodeProxyDriver
) -> None:
    """P4.5 and P4.8: at a second address and at loopback, NodePorts are not served, and no process
    listens."""
    await install(driver, service(port(backends("local1"))))
    assert site.call("node", "127.0.0.1", NODE_PORT) == REFUSED
    assert site.call("caller", "192.168.1.2", NODE_PORT) == REFUSED
    assert site.call("node", NODE4, NODE_PORT) == Seen("local1", NODE4)


async def test_ip_mode_proxy_leaves_the_node(site: Site, driver: NodeProxyDriver) -> None:
    """P11.1: an ingress address that is not in the plan is not served by the node; here the router
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
