"""What the controller reports about announcements that cannot be made as requested."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from tests.makers import make_service

from fairlead.announce_sections import (
    AnnounceConfig,
    BgpConfig,
    BgpPeerConfig,
    LabelSelector,
    PoolAnnounce,
)
from fairlead.config import Config, PoolConfig
from fairlead.kube.crds import AddressPool, BGPPeer
from fairlead.kube.objects import ObjectKey
from fairlead.model import Announcement, Finding
from fairlead.plan.annotations import not_understood
from fairlead.plan.announce import AnnouncePlan
from fairlead.plan.announce_notes import AGGREGATION_NARROWED, announce_notes, narrowed
from fairlead.plan.pool_terms import PoolTerms
from fairlead.state import State

ROUTER = BgpPeerConfig(name="router", asn=64512, address="192.0.2.1")
BGP = AnnounceConfig(method="bgp", bgp=BgpConfig(asn=64513, peers=(ROUTER,)))


def notes(
    config: Config,
    *,
    pool: Mapping[str, Any] | None = None,
    peers: Mapping[str, Mapping[str, Any]] | None = None,
    **annotations: str,
) -> list[Finding]:
    """Return the Findings about a Service with 203.0.113.1. `pool`: the section `announce` of an
    AddressPool. `peers`: the specs of the BGPPeers by name; None: they cannot be read."""
    state = State(())
    if pool is not None:
        body = {
            "metadata": {"name": "main"},
            "spec": {"addresses": ["203.0.113.0/28"], "announce": pool},
        }
        state.update_pools({ObjectKey("", "main"): msgspec.convert(body, AddressPool)})
    if peers is not None:
        state.update_bgp_peers(
            {
                ObjectKey("", name): msgspec.convert(
                    {"metadata": {"name": name}, "spec": spec}, BGPPeer
                )
                for name, spec in peers.items()
            }
        )
    plan = AnnouncePlan(config)
    given = {f"fairlead.io/{name.replace('_', '-')}": text for name, text in annotations.items()}
    service, addresses = make_service(annotations=given), ("203.0.113.1",)
    announcements = plan.announcements_of(state, service, addresses)
    return announce_notes(state, config, plan, service, addresses, announcements)


def test_a_sound_request_has_no_notes() -> None:
    assert notes(Config(announce=BGP), peers={}) == []
    assert notes(Config(announce=BGP), pool={"peers": ["router"]}, peers={}) == []
    assert notes(Config(announce=AnnounceConfig("l2")), pool={}, peers={}, announce="none") == []


@pytest.mark.parametrize(
    ("config", "options", "code", "words", "blocks"),
    [
        (
            Config(),
            {"announce": "l2"},
            "AnnotationWithoutEffect",
            "fairlead.io/announce has no effect: no host announces addresses",
            "",
        ),
        (
            Config(),
            {"pool": {"method": "bgp"}},
            "NotAnnounced",
            "pool main requests bgp, but no host announces addresses",
            "",
        ),
        (
            Config(announce=AnnounceConfig("bgp")),
            {"peers": {}},
            "NotAnnounced",
            "203.0.113.1 is not announced: there are no BGP peers",
            "Ready",
        ),
        (
            Config(announce=BGP),
            {"peers": {"tor": {"asn": 64512}}, "bgp_peers": "tor,tor9"},
            "AnnotationNotUnderstood",
            "there is no BGP peer tor9; known peers: router, tor",
            "",
        ),
        (
            Config(announce=BGP),
            {"pool": {"peers": ["tor8", "router"]}, "peers": {}},
            "BgpPeerUnknown",
            "peers of pool main: there is no BGP peer tor8; known peers: router",
            "",
        ),
        (
            Config(announce=AnnounceConfig("l2")),
            {"bgp_peers": "router"},
            "AnnotationWithoutEffect",
            "fairlead.io/bgp-peers has no effect: no address is announced by BGP",
            "",
        ),
        (
            Config(announce=AnnounceConfig("bgp", bgp=BgpConfig(speaker="routes"))),
            {"bgp_peers": "router", "peers": {}},
            "AnnotationWithoutEffect",
            "the routing daemon of each host selects its neighbors",
            "",
        ),
        (
            Config(announce=AnnounceConfig("l2")),
            {"pool": {"nodeSelectors": [{"matchLabels": {"edge": ""}}]}},
            "NotAnnounced",
            "no Node has the labels that nodeSelectors of pool main require",
            "Ready",
        ),
        (
            Config(announce=BGP),
            {"pool": {"method": "bgp", "communities": ["64512:70000"]}, "peers": {}},
            "PoolAnnounceInvalid",
            "spec.announce.communities[0]: '64512:70000' has a number above 65535; this value is "
            "left out",
            "",
        ),
        (
            Config(announce=BGP),
            {"pool": {"localPreference": "high"}, "peers": {}},
            "PoolAnnounceInvalid",
            "203.0.113.1 is not announced",
            "Ready",
        ),
    ],
)
def test_what_cannot_be_followed_is_reported(
    config: Config, options: dict[str, Any], code: str, words: str, blocks: str
) -> None:
    (note,) = notes(config, **options)
    assert (note.code, note.blocks) == (code, blocks)
    assert words in str(note)


def test_a_service_without_any_known_peer_is_not_announced() -> None:
    found = notes(Config(announce=BGP), peers={}, bgp_peers="tor9")
    assert [each.code for each in found] == ["AnnotationNotUnderstood", "NotAnnounced"]
    assert "none of its BGP peers exists" in str(found[1])


def test_a_service_gets_no_peers_that_its_pool_does_not_permit() -> None:
    peers = {"tor": {"asn": 64512}}
    pool = {"peers": ["router"]}
    (note,) = notes(Config(announce=BGP), pool=pool, peers=peers, bgp_peers="router,tor")
    assert (note.code, note.blocks) == ("AnnotationNotUnderstood", "")
    assert "fairlead.io/bgp-peers: pool main does not permit tor" in str(note)
    found = notes(Config(announce=BGP), pool=pool, peers=peers, bgp_peers="tor")
    assert [each.code for each in found] == ["AnnotationNotUnderstood", "NotAnnounced"]
    assert "pool main permits none of the peers that fairlead.io/bgp-peers names" in str(found[1])


def test_nothing_is_said_about_peers_that_cannot_be_read() -> None:
    assert notes(Config(announce=BGP), bgp_peers="tor9") == []
    assert notes(Config(announce=AnnounceConfig("bgp"))) == []


def test_a_selector_of_the_configuration_is_named_by_its_pool() -> None:
    selectors = (LabelSelector({"edge": ""}),)
    pool = PoolConfig("file", ("203.0.113.0/28",), announce=PoolAnnounce("l2", (), selectors))
    (note,) = notes(Config(pools=(pool,), announce=AnnounceConfig()))
    assert "nodeSelectors of pool file" in str(note)


def test_an_invalid_method_is_reported() -> None:
    (note,) = not_understood({"fairlead.io/announce": "arp"})
    assert str(note) == (
        "fairlead.io/announce is 'arp', which is no way to announce; the pool decides; write bgp, "
        "l2, none"
    )
    assert not_understood({"fairlead.io/announce": "l2", "fairlead.io/bgp-peers": "a"}) == []


def test_a_prefix_that_would_leave_the_pool_is_reported() -> None:
    section = PoolAnnounce("bgp", aggregation_length=24)
    announcement = Announcement(("203.0.113.1",), "bgp", aggregation_length=28)
    (found,) = narrowed(PoolTerms("main", section), announcement)
    assert found.code == AGGREGATION_NARROWED
    assert "aggregationLength 24 of pool main" in found.message
    assert "a prefix of length 28" in found.message
    assert not list(narrowed(PoolTerms("main", PoolAnnounce("bgp")), announcement))
