"""A gateway announces by BGP if the configuration says so, and withdraws everything otherwise."""

from pathlib import Path

import msgspec

from fairlead.config import Config
from fairlead.drivers.announce import NoAnnouncement
from fairlead.drivers.bgp import BgpDriver, NoBgp
from fairlead.roles.gateway import data_plane
from fairlead.state import State

ROUTER = {"name": "tor1", "address": "192.0.2.1", "asn": 64512}


def test_the_section_decides(tmp_path: Path) -> None:
    state = State(())
    assert isinstance(data_plane(Config(), ("eth0",), state).bgp, NoBgp)
    section = {"asn": 64513, "routers": [ROUTER], "directory": str(tmp_path)}
    config = msgspec.convert({"announce": {"bgp": section}}, Config)
    plane = data_plane(config, ("eth0",), state)
    assert isinstance(plane.announce, NoAnnouncement)
    assert isinstance(plane.bgp, BgpDriver)
    assert plane[-1] is plane.bgp, "a clean-up withdraws addresses before anything else"
