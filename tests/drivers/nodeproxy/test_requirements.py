"""The limit of the conntrack table: it is reported as too low when more than half of the table is
used."""

import os
import socket
import subprocess

import pytest

from fairlead.drivers.host import harmful_settings
from fairlead.drivers.nodeproxy.requirements import LIMIT, requirements, requirements_of
from fairlead.lab import namespace

TRACK = (
    "add table inet t; add chain inet t c { type filter hook output priority 0; }; add rule "
    "inet t c ct state new accept"
)


@pytest.mark.parametrize(
    ("flows", "limit", "found"),
    [
        (0, "1", []),
        (131_072, "262144", []),
        (131_073, "262144", ["524288"]),
        (262_144, "262144", ["524288"]),
        (1_000_000, "262144", ["2097152"]),
    ],
)
def test_a_conntrack_limit_below_twice_the_flows_is_harmful(
    flows: int, limit: str, found: list[str]
) -> None:
    assert [
        each.requirement.recommended
        for each in harmful_settings(requirements_of(flows), {LIMIT: limit}.get)
    ] == found
    for enough in found:
        assert harmful_settings(requirements_of(flows), {LIMIT: enough}.get) == ()


@pytest.mark.root
def test_a_node_requires_a_conntrack_limit_of_twice_its_flows() -> None:
    name = f"flt-{os.getpid()}-room"
    namespace.create(name)
    try:
        with namespace.inside(name):
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            assert requirements() == ()
            subprocess.run(["nft", TRACK], check=True)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                for port in range(9001, 9006):
                    sock.sendto(b"", ("127.0.0.1", port))
            (requirement,) = requirements()
            assert (
                requirement.setting,
                requirement.recommended,
                requirement.harmful("9"),
                requirement.harmful("10"),
            ) == (
                LIMIT,
                "16",
                True,
                False,
            )
            # The limit is also reported to a node in a separate namespace, because every namespace
            # can read it.
            assert harmful_settings([requirement]) == ()
    finally:
        namespace.delete(name)
