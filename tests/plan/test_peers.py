"""Which BGP peers a host has, and why others are not used."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from fairlead.announce_sections import BgpConfig, BgpPeerConfig, LabelSelector
from fairlead.kube.crds import BGPPeer
from fairlead.plan.peers import host_peers

SECTION = BgpConfig(asn=64513)
SOUND = {"asn": 64512, "address": "192.0.2.1"}


def objects(**specs: Mapping[str, Any]) -> dict[str, BGPPeer]:
    return {
        name: msgspec.convert({"metadata": {"name": name}, "spec": spec}, BGPPeer)
        for name, spec in specs.items()
    }


def problems(section: BgpConfig = SECTION, **specs: Mapping[str, Any]) -> dict[str, str]:
    """Return the problem of each peer of a host; empty if it has none."""
    return {
        each.name: str(each.problem or "") for each in host_peers(section, objects(**specs), {})
    }


def test_the_fields_of_a_peer_are_read() -> None:
    spec = SOUND | {
        "localASN": 4200000000,
        "bfd": {"intervalMs": 50},
        "passwordSecret": {"name": "bgp"},
        "families": ["IPv6"],
    }
    (peer,) = host_peers(SECTION, objects(tor=spec), None)
    assert peer.problem is None
    assert (peer.spec.local_asn, peer.spec.families) == (4200000000, ("IPv6",))
    assert peer.spec.bfd is not None
    assert (peer.spec.bfd.interval_ms, peer.spec.bfd.multiplier) == (50, 3)
    assert peer.spec.password_secret is not None
    assert (peer.spec.password_secret.name, peer.spec.password_secret.key) == ("bgp", "password")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"asn": 0, "address": "192.0.2.1"}, "$.asn"),
        ({"asn": 4294967295, "address": "192.0.2.1"}, "$.asn"),
        ({"asn": "other", "address": "192.0.2.1"}, "$.asn"),
        ({"address": "192.0.2.1"}, "missing required field `asn`"),
        ({"asn": 64512}, "spec.address: address is missing"),
        (SOUND | {"interface": "eth0"}, "both address and interface are set"),
        (SOUND | {"colour": "red"}, "unknown field `colour`"),
        (SOUND | {"address": "router"}, "'router' is not an IP address"),
        (SOUND | {"address": "fe80::1"}, "needs an interface exactly if it is link-local"),
        (SOUND | {"sourceAddress": "2001:db8::1"}, "different families"),
        (SOUND | {"sourceAddress": "fe80::2%eth0"}, "fe80::2%eth0 is a link-local address"),
        (SOUND | {"holdTimeS": 6}, "keepaliveTimeS 3 is more than a third of holdTimeS"),
        (SOUND | {"ttlSecurity": True, "multihop": 2}, "directly connected"),
        (SOUND | {"gracefulRestart": True}, "graceful restart without BFD"),
        (
            SOUND | {"nodeSelectors": [{"matchExpressions": [{"key": "a", "operator": "In"}]}]},
            "",
        ),
    ],
)
def test_a_peer_that_cannot_be_used_does_not_affect_others(
    spec: dict[str, Any], words: str
) -> None:
    found = problems(bad=spec, good=SOUND)
    assert found["good"] == ""
    if words:
        assert found["bad"].startswith("BGP peer bad is not used: spec")
        assert words in found["bad"]
    else:
        assert "bad" not in found  # its selector matches no host


def test_the_own_as_number_is_required() -> None:
    section = BgpConfig()
    assert "our AS number is missing" in problems(section, tor=SOUND)["tor"]
    assert problems(section, tor=SOUND | {"localASN": 64999})["tor"] == ""


def test_selectors_choose_hosts() -> None:
    section = BgpConfig(
        asn=64513,
        peers=(
            BgpPeerConfig(name="all", asn=64512, address="192.0.2.1"),
            BgpPeerConfig(
                name="r1",
                asn=64512,
                address="192.0.2.2",
                node_selectors=(LabelSelector({"rack": "r1"}),),
            ),
        ),
    )
    named = objects(r2=SOUND | {"nodeSelectors": [{"matchLabels": {"rack": "r2"}}]})

    def names(labels: Mapping[str, str] | None) -> list[str]:
        return [each.name for each in host_peers(section, named, labels)]

    assert names({"rack": "r1"}) == ["all", "r1"]
    assert names({"rack": "r2"}) == ["all", "r2"]
    assert names({}) == names(None) == ["all"]


def test_a_peer_of_the_file_takes_precedence() -> None:
    section = BgpConfig(
        asn=64513, peers=(BgpPeerConfig(name="tor", asn=64500, address="192.0.2.9"),)
    )
    first, second = host_peers(section, objects(tor=SOUND), {})
    assert (first.spec.asn, first.problem) == (64500, None)
    assert "the configuration file" in str(second.problem)


def test_peers_of_the_file_and_older_objects_come_first() -> None:
    """A new object does not take the neighbor of a peer that is in use."""
    section = BgpConfig(
        asn=64513, peers=(BgpPeerConfig(name="tor", asn=64512, address="192.0.2.1"),)
    )
    made = {"aaa": "2026-03-01T00:00:00Z", "old": "2026-01-01T00:00:00Z"}
    named = {
        name: msgspec.convert(
            {"metadata": {"name": name, "creationTimestamp": time}, "spec": SOUND}, BGPPeer
        )
        for name, time in made.items()
    }
    assert [each.name for each in host_peers(section, named, {})] == ["tor", "old", "aaa"]
