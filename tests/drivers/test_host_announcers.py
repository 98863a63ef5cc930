"""Other announcers of a host are found by the addresses of real interfaces, by the kernel's ARP
settings, and by real control sockets."""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.drivers.inside import run_inside

from fairlead.drivers.host_announcers import read
from fairlead.lab import namespace
from fairlead.plan.other_announcers import HostAnnouncers, address_conflicts

NAME = f"flt-{os.getpid()}-announcers"
VIP, VIP6, OTHER = "203.0.113.10", "2001:db8:f::10", "203.0.113.11"


def ip(*words: str) -> None:
    subprocess.run(["ip", "-n", NAME, *words], check=True, capture_output=True, timeout=10)


@pytest.fixture
def host() -> Iterator[None]:
    """A host with an interface, and with addresses on an interface as kube-proxy makes it in IPVS
    mode. The test kernel may lack dummy devices; a bridge without ports does the same."""
    try:
        namespace.create(NAME)
        namespace.set_sysctls(
            NAME, {f"net/ipv4/conf/{each}/arp_ignore": 0 for each in ("all", "default")}
        )
        ip("link", "add", "e0", "type", "veth", "peer", "name", "e1")
        ip("link", "add", "kube-ipvs0", "type", "bridge")
        ip("address", "add", f"{VIP}/32", "dev", "kube-ipvs0")
        ip("address", "add", f"{VIP6}/128", "dev", "kube-ipvs0")
        yield
    finally:
        namespace.delete(NAME)


def facts() -> HostAnnouncers:
    found: list[HostAnnouncers] = []

    async def scenario() -> None:
        found.append(read())

    run_inside(NAME, scenario)
    return found[0]


def test_addresses_of_kube_proxy_in_ipvs_mode_are_a_conflict_without_strict_arp(host: None) -> None:
    (found,) = address_conflicts({VIP, VIP6}, facts(), ["e0"])
    assert found.subject == "interface kube-ipvs0"
    assert VIP in found.message
    assert VIP6 not in found.message, "IPv6 answers only for addresses of the interface"
    assert "ipvs.strictARP" in found.remedy
    # What kube-proxy does with ipvs.strictARP.
    namespace.set_sysctls(NAME, {"net/ipv4/conf/all/arp_ignore": 1})
    assert address_conflicts({VIP, VIP6}, facts(), ["e0"]) == []


def test_strict_arp_of_the_interface_is_enough(host: None) -> None:
    namespace.set_sysctls(NAME, {"net/ipv4/conf/e0/arp_ignore": 1})
    assert address_conflicts({VIP}, facts(), ["e0"]) == []
    (found,) = address_conflicts({VIP}, facts(), ["e0", "e1"])
    assert "requests for it on e1," in found.message


def test_an_address_of_an_ordinary_interface_belongs_to_another_announcer(host: None) -> None:
    ip("address", "add", f"{OTHER}/32", "dev", "e0")
    namespace.set_sysctls(NAME, {"net/ipv4/conf/all/arp_ignore": 1})
    (found,) = address_conflicts({VIP, OTHER}, facts(), ["e0"])
    assert (found.severity, found.subject) == ("error", "interface e0")
    assert found.remedy.endswith(f"ip address delete {OTHER} dev e0")


def test_a_daemon_is_found_while_a_process_listens_on_its_control_socket(
    host: None, tmp_path: Path
) -> None:
    path = tmp_path / "calico" / "bird.ctl"
    path.parent.mkdir()
    with namespace.inside(NAME):
        daemon = socket.socket(socket.AF_UNIX)
    with daemon:
        daemon.bind(str(path))
        assert facts().daemons == (), "a socket that does not listen is of no daemon"
        daemon.listen()
        (found,) = facts().daemons
        assert (found.name, found.evidence) == ("Calico's BIRD", f"it listens at {path}")
        assert read().daemons == (), "a daemon in another network does not count"
    assert path.exists(), "the file of a process that was killed stays"
    assert facts().daemons == ()
