"""Packets to one Service do not affect the session affinity of another: real packets from forged
sources."""

import itertools
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
import pytest
from tests.drivers.nodeproxy.conftest import (
    CLIENT4,
    NODE4,
    NODE6,
    POD_CIDRS,
    SERVICE_CIDRS,
    VIP4,
    Seen,
    Site,
    backends,
    install,
    port,
    service,
)

from fairlead.drivers.nodeproxy import NodeProxyDriver
from fairlead.drivers.nodeproxy.affinity import AffinityMaps
from fairlead.drivers.nodeproxy.cleanup import losing_endpoints
from fairlead.drivers.nodeproxy.elements import Spec, affinity_map_of, elements_of
from fairlead.drivers.nodeproxy.skeleton import AFFINITY_MAPS
from fairlead.lab import namespace
from fairlead.model import Backend, NodeService, ServiceKey

NODES = (NODE4, NODE6)
FLOODED, BYSTANDER = "198.51.100.30", VIP4
SILENT_POD = "10.2.0.99"
FULL = 65_535
"""Maximum number of clients in one map of the kernel."""
CALLS = 20
"""The number of connections of a client to two endpoints. By chance all reach the same endpoint
once in half a million runs."""


def nft(*words: str) -> str:
    return subprocess.run(["nft", *words], check=True, capture_output=True, text=True).stdout


def service_with_affinity(
    name: str, address: str, *pods: str, timeout_s: int = 600, cluster_ip: str = ""
) -> NodeService:
    each = port(backends(*pods), balancers=(address,), node_port=0, cluster_ip=cluster_ip)
    return service(
        msgspec.structs.replace(each, external_ips=()), name=name, affinity_timeout_s=timeout_s
    )


def flooded(*dns: Backend) -> NodeService:
    """Return the flooded Service; its TCP port 80 has a pod that answers."""
    web = service_with_affinity("flooded", FLOODED, "local1", cluster_ip="172.30.0.42").ports[0]
    udp = port(
        dns, number=53, protocol="UDP", balancers=(FLOODED,), node_port=0, cluster_ip="172.30.0.42"
    )
    return service(
        web, msgspec.structs.replace(udp, external_ips=()), name="flooded", affinity_timeout_s=600
    )


@contextmanager
def forging(site: Site) -> Iterator[socket.socket]:
    with namespace.make_socket(
        site.name("client"), socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW
    ) as made:
        yield made


def datagram(source: int, target: str, number: int) -> bytes:
    """Return a datagram from a source address, given as a number. The kernel fills in the checksum
    of the IP header; the checksum of UDP may be omitted."""
    udp = struct.pack(">HHHH", 4000, number, 12, 0) + b"line"
    return (
        struct.pack(
            ">BBHHHBBHI4s",
            0x45,
            0,
            20 + len(udp),
            0,
            0,
            64,
            17,
            0,
            source,
            socket.inet_aton(target),
        )
        + udp
    )


def listed(name: str) -> str:
    """Return a map as text. A full one takes most of a second."""
    return nft("list", "map", "inet", "fairlead", name)


def clients(name: str) -> int:
    return listed(name).count("expires")


def number_of(held: Mapping[ServiceKey, Spec], key: ServiceKey) -> int | None:
    return affinity_map_of(held[key])


@pytest.mark.soak
@pytest.mark.root
async def test_a_flood_from_forged_sources_does_not_affect_the_affinity_of_other_services(
    site: Site, driver: NodeProxyDriver
) -> None:
    bystander, attacked = (
        service_with_affinity("bystander", BYSTANDER, "local1", "local2"),
        flooded(Backend(SILENT_POD, 53, False)),
    )
    site.ip("other", f"route replace blackhole {SILENT_POD}")
    await install(driver, bystander, attacked)
    held = dict(await driver.read(None))
    theirs = number_of(held, attacked.service)
    assert theirs != number_of(held, bystander.service)
    before = site.call("client", BYSTANDER, 80)
    with forging(site) as sender:
        sources = itertools.count(*struct.unpack(">I", socket.inet_aton("100.64.0.0")))
        missing = FULL
        while missing:
            for source in itertools.islice(sources, missing):
                sender.sendto(datagram(source, FLOODED, 53), (FLOODED, 0))
            missing = FULL - clients(f"affinity4_{theirs}")
    assert {site.call("client", BYSTANDER, 80) for _ in range(CALLS)} == {before}
    (first,) = {site.call("blocked", BYSTANDER, 80) for _ in range(CALLS)}  # a new client
    assert isinstance(first, Seen)
    # If the map is full, a new client is answered but not recorded.
    assert site.call("client", FLOODED, 80) == Seen("local1", NODE4)
    assert f"{FLOODED} . 6 . 80 . {CLIENT4}" not in listed(f"affinity4_{theirs}")
    # When an endpoint is removed, exactly the clients that are recorded with it are deleted.
    await install(driver, bystander, flooded(*backends("local2", port=5353)))
    assert clients(f"affinity4_{theirs}") == 0
    assert {site.call("client", BYSTANDER, 80) for _ in range(CALLS)} == {before}
    assert site.call("client", FLOODED, 80) == Seen("local1", NODE4)
    assert clients(f"affinity4_{theirs}") == 1


@pytest.mark.root
async def test_a_service_keeps_its_map_after_a_restart(site: Site, driver: NodeProxyDriver) -> None:
    first, second = (
        service_with_affinity("a", FLOODED, "local1", cluster_ip="172.30.0.42"),
        service_with_affinity("b", BYSTANDER, "local1", "local2"),
    )
    await install(driver, first, second)
    before = site.call("client", BYSTANDER, 80)
    await install(driver, second)
    successor = NodeProxyDriver(
        node_addresses=lambda: NODES, pod_cidrs=POD_CIDRS, service_cidrs=SERVICE_CIDRS
    )
    await successor.open()
    try:
        assert (
            successor.diff(successor.render({second.service: second}), await successor.read(None))
            == ()
        )
        await install(
            successor,
            service_with_affinity("c", FLOODED, "local1", cluster_ip="172.30.0.42"),
            second,
        )
        held = dict(await successor.read(None))
        assert {number_of(held, key) for key in held} == {0, 1}
        assert {site.call("client", BYSTANDER, 80) for _ in range(CALLS)} == {before}
    finally:
        await successor.close(remove=False)


@pytest.mark.root
async def test_a_changed_affinity_timeout_keeps_clients_and_leaves_no_chain(
    site: Site, driver: NodeProxyDriver
) -> None:
    await install(driver, service_with_affinity("a", BYSTANDER, "local1", "local2", timeout_s=600))
    before = site.call("client", BYSTANDER, 80)
    for timeout_s in (700, 800, 900):
        await install(
            driver, service_with_affinity("a", BYSTANDER, "local1", "local2", timeout_s=timeout_s)
        )
    assert {site.call("client", BYSTANDER, 80) for _ in range(CALLS)} == {before}
    assert nft("list", "chains", "inet").count("chain remember4_") == 1
    assert not await driver.disturbed()


def test_each_service_has_its_own_map_up_to_the_limit() -> None:
    maps = AffinityMaps()
    keys = [ServiceKey("default", f"s{number}") for number in range(AFFINITY_MAPS + 1)]
    numbers = [maps.of(key) for key in keys]
    assert len(set(numbers)) == AFFINITY_MAPS
    maps.release(keys[:2])
    assert maps.of(ServiceKey("default", "other")) in numbers[:2]
    assert maps.of(keys[-1]) == numbers[-1]


def test_only_maps_of_services_that_lost_an_endpoint_are_searched() -> None:
    """The maps of a Service that lost no endpoint are not searched, for any other change."""

    def spec(*pods: str, external: str = "Cluster", timeout_s: int = 600) -> Spec:
        each = service(port(backends(*pods)), external=external, affinity_timeout_s=timeout_s)
        return elements_of(each, NODES)

    one, two = spec("local1"), spec("local1", "remote1")
    assert not losing_endpoints(one, two)
    assert not losing_endpoints(one, spec("local1", timeout_s=60))
    assert losing_endpoints(two, one) == losing_endpoints(
        two, spec("local1", "remote1", timeout_s=0)
    )
    assert not losing_endpoints(spec("local1", timeout_s=0), spec(timeout_s=0))
    # Clients from outside now reach local endpoints only, at the external addresses.
    here = losing_endpoints(two, spec("local1", "remote1", external="Local"))
    assert here
    assert all(frontend.startswith(("198.51.100.", "192.168.", "2001:")) for frontend in here)


def test_the_number_of_a_removed_service_is_reused_first() -> None:
    maps = AffinityMaps()
    services = [ServiceKey("default", f"web-{number}") for number in range(AFFINITY_MAPS)]
    assert len({maps.of(each) for each in services}) == AFFINITY_MAPS
    gone = maps.of(services[77])
    maps.release([services[77]])
    assert services[77] not in maps
    assert maps.of(ServiceKey("default", "another")) == gone
