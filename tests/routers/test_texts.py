"""The decision, and its texts: BIRD accepts the texts of any plan, and what is missing is refused
in words."""

import ipaddress
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.routers.site import GATEWAYS, ROUTER

from fairlead.config import PoolConfig
from fairlead.errors import Refused
from fairlead.routers import bird as router_text
from fairlead.routers import frr, speaker, static
from fairlead.routers.planning import (
    check_apart,
    merged,
    next_hop_of,
    notes_of,
    plain_name,
    reach_of,
    side_of_gateways,
)
from fairlead.routers.values import Hop, Reach

POOL = PoolConfig("main", ("203.0.113.0/28", "2001:db8:f::/120"))
HOSTILE = PoolConfig('a"\n} protocol static x {', ("198.51.100.6-198.51.100.9",))


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, ...]:
    """Return ranges of a pool: CIDRs, single addresses, and ranges that are no prefix."""
    found = []
    for base in draw(
        st.sampled_from([("203.0.113.0",), ("2001:db8:f::",), ("203.0.113.0", "2001:db8:f::")])
    ):
        first = ipaddress.ip_address(base) + draw(st.integers(0, 100))
        last = first + draw(st.integers(0, 150))
        longer = 96 if first.version == 6 else 0
        found.append(
            draw(
                st.sampled_from(
                    [f"{first}-{last}", str(first), f"{base}/{draw(st.integers(24, 32)) + longer}"]
                )
            )
        )
    return tuple(found)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Reach, Reach]:
    """Return the plans of the router and of the gateways."""
    names = st.text(max_size=40) | st.just('gw"; } # \n')
    numbers = st.integers(1, 65534) | st.integers(1, 4294967294)
    hops = [
        Hop(draw(names), (f"192.0.2.{number}", f"2001:db8:2::{number:x}"))
        for number in range(1, draw(st.integers(1, 20)) + 1)
    ]
    pools = [PoolConfig(draw(names.filter(len)), draw(ranges()))]
    options = {"asn": draw(numbers), "router_asn": draw(numbers)}
    if draw(st.booleans()):
        options["router_asn"] = options["asn"]
    bfd = draw(st.booleans())
    return reach_of(pools, hops, **options, bfd=bfd), side_of_gateways(pools, **options, bfd=bfd)


@settings(max_examples=20)
@given(both=plans())
def test_bird_accepts_every_configuration(bird: Path, both: tuple[Reach, Reach]) -> None:
    router, gateways = both
    for text in (router_text.render(router), speaker.render(gateways, ROUTER)):
        done = subprocess.run(
            [bird, "-p", "-c", "/dev/stdin"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), text


def test_bird_is_asked_and_rejects_a_mistake(bird: Path) -> None:
    done = subprocess.run(
        [bird, "-p", "-c", "/dev/stdin"],
        input="protocol bgp x { local as 0; }",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0


def test_a_router_accepts_only_single_addresses_of_the_pools() -> None:
    reach = reach_of([POOL, HOSTILE], GATEWAYS, bfd=True)
    text = router_text.render(reach)
    assert (
        "filter fairlead4 {\n"
        "    if net ~ [ 203.0.113.0/28{32,32}, 198.51.100.6/31{32,32}, 198.51.100.8/31{32,32} ] "
        "then accept;\n"
        "    reject;\n"
    ) in text
    assert "if net ~ [ 2001:db8:f::/120{128,128} ] then accept;" in text
    assert "import limit 20 action block;" in text
    assert text.count("export none;") == 4
    commands = frr.render(reach)
    assert "\nip prefix-list fairlead4 seq 5 permit 203.0.113.0/28 ge 32\n" in commands
    assert "\nipv6 prefix-list fairlead6 seq 5 permit 2001:db8:f::/120 ge 128\n" in commands
    for family in "46":
        assert f"\n  neighbor fairlead{family} route-map fairlead{family} in\n" in commands
        assert f"\n  neighbor fairlead{family} route-map fairlead-nothing out\n" in commands
    assert "\n  neighbor fairlead4 maximum-prefix 20\n" in commands
    assert "\n bgp bestpath as-path multipath-relax\n" in commands
    single = reach_of([PoolConfig("one", ("203.0.113.7",))], GATEWAYS)
    assert " permit 203.0.113.7/32\n" in frr.render(single)


def test_an_internal_session_uses_several_paths_too() -> None:
    commands = frr.render(reach_of([POOL], GATEWAYS, asn=64512, router_asn=64512))
    assert "\n  maximum-paths ibgp 16\n" in commands


def test_gateways_restart_gracefully_only_with_bfd() -> None:
    """Without BFD, the routes of a dead host would stay for the time of a restart."""
    for bfd in (True, False):
        text = speaker.render(side_of_gateways([POOL], bfd=bfd), ROUTER)
        assert ("graceful restart on;" in text) == bfd
        assert ("    bfd { interval 100 ms; multiplier 3; };" in text) == bfd


def test_no_name_ends_a_comment() -> None:
    reach = reach_of([HOSTILE], [Hop("gw\n} x\u2028", GATEWAYS[0].addresses)])
    for line in static.render(reach).splitlines():
        assert line.startswith(("#", "sysctl ", "ip route replace "))
        assert "protocol" not in line.partition("#")[0]
    assert " neighbor 192.0.2.11 description gw} x\n" in frr.render(reach)
    assert "from fairlead_gateway {  # gw} x\n" in router_text.render(reach)
    assert plain_name("\n") == "?"


def test_the_plan_does_not_depend_on_the_order_of_gateways() -> None:
    assert reach_of([POOL], GATEWAYS) == reach_of([POOL], GATEWAYS[::-1])


def test_each_family_has_the_gateways_with_an_address_of_it() -> None:
    reach = reach_of([POOL], (GATEWAYS[0], Hop("old", ("192.0.2.13",))))
    assert [name for name, _ in reach.addresses("IPv4")] == ["gw1", "old"]
    assert [name for name, _ in reach.addresses("IPv6")] == ["gw1"]
    (note,) = notes_of(reach)
    assert note.startswith("no IPv6 address is known of old: ")
    many = reach_of([POOL], [Hop(f"g{n}", (f"192.0.2.{n}",)) for n in range(1, 21)])
    assert any("there are 20 next hops" in each for each in notes_of(many))
    assert many.families == ("IPv4",)
    assert "ip -6" not in static.render(many)


@pytest.mark.parametrize(
    ("pools", "gateways", "words"),
    [
        ([], GATEWAYS, "there is no pool; create an AddressPool"),
        ([POOL], (), "no gateway is known to which a router could send packets; start gateways"),
        (
            [PoolConfig("six", ("2001:db8:f::/120",))],
            [Hop("gw1", ("192.0.2.11",))],
            "the pools have IPv6 addresses, and no gateway has an address of that family",
        ),
        (
            [PoolConfig("lan", ("192.0.2.0/24",))],
            GATEWAYS,
            "address 192.0.2.11 of gateway gw1 is in 192.0.2.0/24 of pool lan, so a route",
        ),
    ],
)
def test_what_is_missing_is_refused_in_words(
    pools: list[PoolConfig], gateways: list[Hop], words: str
) -> None:
    with pytest.raises(Refused) as raised:
        reach_of(pools, gateways)
    assert words in str(raised.value)


def test_the_gateways_need_an_address_of_a_router_in_each_family() -> None:
    reach = side_of_gateways([POOL])
    with pytest.raises(Refused, match="the pools have IPv6 addresses, and no address of a router"):
        speaker.render(reach, ["192.0.2.1"])
    with pytest.raises(Refused, match=r"address 203\.0\.113\.1 of the router is in 203"):
        check_apart(reach, "203.0.113.1", "the router")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gw1=", "'' is not an IP address"),
        ("gw1", "'gw1' is not an IP address"),
        ("192.0.2.1/24", "is not an IP address"),
        ("gw1=fe80::1", "is valid on one link only"),
        ("fe80::1%eth0", "is valid on one link only"),
        ("127.0.0.1", "is not the address of another host"),
        ("224.0.0.1", "is not the address of another host"),
        ("::", "is not the address of another host"),
    ],
)
def test_an_address_that_is_no_next_hop_is_rejected(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        next_hop_of(text)


def test_a_gateway_has_one_address_of_each_family() -> None:
    texts = ("gw1=192.0.2.1", "gw1=2001:DB8::1", "192.0.2.2")
    assert merged(map(next_hop_of, texts)) == [
        Hop("gw1", ("192.0.2.1", "2001:db8::1")),
        Hop("192.0.2.2", ("192.0.2.2",)),
    ]
    with pytest.raises(ValueError, match=r"gw1 has two IPv4 addresses: 192.0.2.1, 192.0.2.3"):
        merged([next_hop_of("gw1=192.0.2.1"), next_hop_of("gw1=192.0.2.3")])
