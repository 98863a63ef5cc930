"""The texts of routers. The parsers of BIRD and FRR read theirs. Junos, IOS and SONiC do not run
here, so their texts are only compared with files."""

import subprocess
from pathlib import Path

import msgspec
import pytest
from tests.routers.sample import ANNOUNCE, HOPS, PEER, POOLS, TEXTS, planned, texts

from fairlead.announce_sections import AnnounceConfig, BfdConfig, BgpConfig, PoolAnnounce, SecretRef
from fairlead.config import PoolConfig
from fairlead.errors import Refused
from fairlead.routers import bird, frr, linux, reach, text
from fairlead.routers.values import MAX_NEXT_HOPS, Method, Reach

MULTIHOP = msgspec.structs.replace(
    PEER, multihop=3, password_secret=SecretRef("session"), families=("IPv4",)
)
GUARDED = msgspec.structs.replace(PEER, ttl_security=True, bfd=None)
INTERNAL = msgspec.structs.replace(PEER, asn="internal")
NEXT_HOPS = msgspec.structs.replace(PEER, next_hops=("192.0.2.128/25",))
UNNUMBERED = msgspec.structs.replace(PEER, address="", interface="eth0")
AGGREGATED = (
    PoolConfig(
        "main",
        ("203.0.113.16-203.0.113.40", "2001:db8:f::/112"),
        announce=PoolAnnounce(aggregation_length=28, aggregation_length_v6=64),
    ),
)


def with_peer(peer: object, request: reach.Request | None = None) -> Reach:
    announce = msgspec.structs.replace(
        ANNOUNCE, bgp=msgspec.structs.replace(ANNOUNCE.bgp, peers=(peer,))
    )
    return reach.plan(POOLS, HOPS, announce, request or reach.Request())


PLANS = {
    "static": planned("static"),
    "bgp": planned("bgp"),
    "multihop": with_peer(MULTIHOP),
    "guarded": with_peer(GUARDED),
    "internal": with_peer(INTERNAL),
    "unnumbered": with_peer(UNNUMBERED),
    "next hops": with_peer(NEXT_HOPS),
    "ranges": with_peer(PEER, reach.Request(ranges=("192.0.2.0/24", "2001:db8:2::/64"))),
    "aggregated": reach.plan(AGGREGATED, HOPS, ANNOUNCE, reach.Request()),
    "unknown router": reach.plan(
        POOLS,
        HOPS,
        AnnounceConfig("bgp", bgp=BgpConfig(asn=4_200_000_000)),
        reach.Request(asn=64512),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_frr_reads_its_text(name: str, tmp_path: Path) -> None:
    file = tmp_path / "frr.conf"
    file.write_text(frr.render(PLANS[name]))
    done = subprocess.run(
        ["vtysh", "-C", "-f", file], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_parser_of_frr_refuses_an_unknown_line(tmp_path: Path) -> None:
    file = tmp_path / "frr.conf"
    file.write_text("router bgp 64512\n neighbor fairlead unknown\n")
    done = subprocess.run(["vtysh", "-C", "-f", file], capture_output=True, check=False, timeout=60)
    assert done.returncode


@pytest.mark.parametrize("name", PLANS)
def test_bird_reads_its_text(name: str, tmp_path: Path) -> None:
    file = tmp_path / "bird.conf"
    file.write_text("router id 192.0.2.1;\nprotocol device {}\n" + bird.render(PLANS[name]))
    done = subprocess.run(
        ["bird", "-p", "-c", file], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", sorted(texts()))
def test_the_texts_are_those_of_the_files(name: str) -> None:
    """If this fails: run `python -m tests.routers.sample`, and read what has changed."""
    assert texts()[name] == (TEXTS / name).read_text()


def test_hosts_with_several_next_hops_fit_into_the_limits() -> None:
    """The pools of the plan have some prefixes; each may come once for each next hop."""
    one, several = PLANS["bgp"], PLANS["next hops"]
    assert "add paths rx;" in bird.render(several)
    assert "add paths" not in bird.render(one)
    assert "maximum-paths 64" in frr.render(several)
    for family in several.families:
        assert several.prefixes(family) == MAX_NEXT_HOPS * one.prefixes(family)
    assert "ADD-PATH" in {each.subject for each in several.notes}


def test_no_file_is_left_over() -> None:
    assert {each.name for each in TEXTS.iterdir()} == set(texts())


def test_no_text_contains_a_password() -> None:
    found = {text.render(PLANS["multihop"], each) for each in ("frr", "bird", "junos", "ios")}
    assert len(found) == 4
    for each in found:
        lines = [one.strip() for one in each.splitlines() if "PASSWORD-OF-THE-SESSION" in one]
        assert lines
        assert all(line.startswith(("!", "#")) for line in lines)


def test_iproute2_has_no_words_for_sessions() -> None:
    with pytest.raises(Refused, match="--method static"):
        linux.render(PLANS["bgp"])


def test_ios_gets_only_values_that_it_accepts() -> None:
    fast = msgspec.structs.replace(
        PEER, next_hops=("192.0.2.128/25",), bfd=BfdConfig(interval_ms=10, multiplier=2)
    )
    xe, xr = text.render(with_peer(fast), "ios").split("! ==== IOS XR")
    assert "maximum-paths 32\n" in xe
    assert "at most 32 next hops here; 64 are needed" in xe
    assert "bfd interval 50 min_rx 50 multiplier 3\n" in xe
    assert "use 10 ms and 2." in xe
    assert "maximum-paths ebgp 64\n" in xr
    assert "here; " not in xr
    slow = msgspec.structs.replace(PEER, bfd=BfdConfig(interval_ms=2000, multiplier=100))
    xe, xr = text.render(with_peer(slow), "ios").split("! ==== IOS XR")
    assert "bfd interval 999 min_rx 999 multiplier 50\n" in xe
    assert "bfd minimum-interval 2000\n  bfd multiplier 16\n" in xr
    assert "here; " not in text.render(PLANS["bgp"], "ios")


@pytest.mark.parametrize("name", PLANS)
def test_each_block_of_ios_xr_is_closed(name: str) -> None:
    """A line that is deeper than the one before opens a block; `exit` or `end-…` closes it."""
    _, xr = text.render(PLANS[name], "ios").split("! ==== IOS XR (then `commit`) ====\n")
    lines = [line for line in xr.splitlines() if not line.startswith("!")]
    depths = [len(line) - len(line.lstrip()) for line in lines]
    for depth, deeper, line in zip(depths[1:], depths, lines[1:], strict=False):
        if depth < deeper:
            assert line.strip() in ("exit", "else", "endif", "end-policy", "end-set")
    assert depths[-1] == 0
    assert "!" not in "\n".join(lines)


def test_junos_gets_everything_that_unnumbered_sessions_need() -> None:
    lines = text.render(PLANS["unnumbered"], "junos").splitlines()
    group = "set protocols bgp group FAIRLEAD"
    assert {
        "set policy-options as-list FAIRLEAD-HOSTS members 64513",
        "set protocols router-advertisement interface INTERFACE.0",
        f"{group} peer-as-list FAIRLEAD-HOSTS",
        f"{group} family inet unicast extended-nexthop",
        f"{group} dynamic-neighbor FAIRLEAD peer-auto-discovery family inet6 ipv6-nd",
        f"{group} dynamic-neighbor FAIRLEAD peer-auto-discovery interface INTERFACE.0",
    } <= set(lines)
    assert f"{group} peer-as 64513" not in lines
    internal = with_peer(
        msgspec.structs.replace(UNNUMBERED, asn="internal"), reach.Request(method="bgp")
    )
    assert "peer-auto-discovery" not in text.render(internal, "junos")
    assert "no unnumbered sessions within one AS" in text.render(internal, "junos")


def test_sonic_is_not_told_to_put_commands_of_several_daemons_into_one_file() -> None:
    found = text.render(PLANS["bgp"], "sonic")
    assert "bgpd.conf" not in found
    assert "configure terminal" in found
    assert "write memory" in found


@pytest.mark.parametrize("method", ["static", "bgp"])
def test_sonic_gets_the_text_of_frr(method: Method) -> None:
    assert text.render(planned(method), "sonic").endswith(frr.render(planned(method)))
