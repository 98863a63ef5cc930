"""A gateway announces by BGP if the configuration says so, and withdraws everything otherwise."""

from pathlib import Path

import msgspec

from fairlead.config import Config
from fairlead.drivers.announce import NoAnnouncement
from fairlead.drivers.bgp import BgpDriver, NoBgp
from fairlead.kube.objects import ObjectKey, Service
from fairlead.roles.gateway import data_plane
from fairlead.state import State

ROUTER = {"name": "tor1", "address": "192.0.2.1", "asn": 64512}


def test_the_section_decides_and_the_addresses_of_services_are_no_leftovers(tmp_path: Path) -> None:
    state = State(())
    assert isinstance(data_plane(Config(), ("eth0",), state).bgp, NoBgp)
    section = {"asn": 64513, "routers": [ROUTER], "directory": str(tmp_path)}
    config = msgspec.convert({"announce": {"bgp": section}}, Config)
    plane = data_plane(config, ("eth0",), state)
    assert isinstance(plane.announce, NoAnnouncement)
    assert isinstance(plane.bgp, BgpDriver)
    assert plane[-1] is plane.bgp, "a clean-up withdraws addresses before anything else"
    ingress = [{"ip": "203.0.113.10"}, {"hostname": "203-0-113-11.example.com"}]
    service = msgspec.convert(
        {
            "metadata": {"name": "web", "namespace": "default"},
            "status": {"loadBalancer": {"ingress": ingress}},
        },
        Service,
    )
    state.update_services({ObjectKey("default", "web"): service})
    assert plane.bgp.shown() == {"203.0.113.10"}
