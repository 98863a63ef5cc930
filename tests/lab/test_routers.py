"""The configuration of the router's daemons, the section `announce` of the lab, and what is read
from the tools of the daemons."""

from pathlib import Path

import msgspec
import pytest
import yaml

from fairlead.config import parse
from fairlead.errors import Refused
from fairlead.lab import settings
from fairlead.lab.gobgp import routes_of
from fairlead.lab.routers import Routing, Session, check, router_files, sessions
from fairlead.lab.rundir import Size

HOME = Path("/run/fairlead/lab/x/router")
BIRD_PROTOCOLS = """BIRD 2.0.12 ready.
Name       Proto      Table      State  Since         Info
device1    Device     ---        up     12:00:00.000
from_lan4  BGP        ---        start  12:00:00.000  Passive
  BGP state:          Passive
    Neighbor range:   192.0.2.0/24
    Local AS:         64512

lan4_1     BGP        ---        up     12:00:01.000  Established
  BGP state:          Established
    Neighbor address: 192.0.2.11
    Neighbor AS:      64513
  Channel ipv4
    State:          UP
    Routes:         3 imported, 0 exported, 3 preferred
  Channel ipv6
    State:          UP
    Routes:         1 imported, 0 exported, 1 preferred

lan4_2     BGP        ---        start  12:00:01.000  Active
  BGP state:          Active
    Neighbor address: 192.0.2.12
"""
BIRD_BFD = """BIRD 2.0.12 ready.
bfd1:
IP address                Interface  State      Since         Interval  Timeout
192.0.2.11                lan        Up         12:00:01.000    0.100    0.300
192.0.2.12                lan        Down       12:00:01.000    1.000    0.000
"""
FRR_SUMMARY = """{"ipv4Unicast": {"peers": {
  "192.0.2.11": {"state": "Established", "pfxRcd": 3, "peerState": "OK"},
  "192.0.2.12": {"state": "Active"}}},
 "ipv6Unicast": {"peers": {"192.0.2.11": {"state": "Established", "pfxRcd": 1}}}}"""
GOBGP_NEIGHBORS = """[
 {"state": {"neighbor_address": "192.0.2.11", "session_state": 6},
  "afi_safis": [{"state": {"received": 3}}, {"state": {"received": 1}}]},
 {"state": {"neighbor_address": "192.0.2.12", "session_state": 3}, "afi_safis": [{}]}]"""
FRR_BFD = '[{"peer": "192.0.2.11", "status": "up"}, {"peer": "192.0.2.12", "status": "down"}]'


def test_both_daemons_accept_the_hosts_of_the_lan_and_use_all_their_routes() -> None:
    bird = router_files(Routing(), HOME).files["bird.conf"]
    frr = router_files(Routing(daemon="frr"), HOME).files["bgpd.conf"]
    for network in ("192.0.2.0/24", "2001:db8:1::/64"):
        assert f"neighbor range {network} external" in bird
        assert f"bgp listen range {network} peer-group hosts" in frr
    assert bird.count("merge paths on limit 64") == frr.count("maximum-paths 64") == 2
    assert "bfd" not in bird + frr


@pytest.mark.parametrize("daemon", ["bird", "frr"])
def test_bfd_is_only_on_if_requested_and_has_the_requested_interval(daemon: str) -> None:
    plan = router_files(Routing(daemon=daemon, bfd_interval_ms=50), HOME)  # type: ignore[arg-type]
    text = "".join(plan.files.values())
    assert "interval 50" in text
    assert "multiplier 3" in text
    assert ("bfdd" in [each.name for each in plan.daemons]) == (daemon == "frr")


@pytest.mark.parametrize("daemon", ["bird", "frr"])
def test_all_files_of_the_daemons_are_in_the_directory_of_the_lab(daemon: str) -> None:
    plan = router_files(Routing(daemon=daemon, bfd_interval_ms=50), HOME)  # type: ignore[arg-type]
    for each in plan.daemons:
        assert each.ready is not None
        assert each.ready.parent == HOME
    lines = [each.argv for each in plan.daemons] + list(plan.tools.values())
    paths = [word for argv in lines for word in argv[1:] if word.startswith("/")]
    assert paths
    assert {path for path in paths if not Path(path).is_relative_to(HOME)} == set()


def test_gobgp_with_bfd_is_refused() -> None:
    check(Routing(daemon="gobgp"))
    with pytest.raises(Refused, match="GoBGP has no BFD"):
        check(Routing(daemon="gobgp", bfd_interval_ms=100))


def test_of_the_paths_that_gobgp_shows_all_that_are_equally_good_become_next_hops() -> None:
    def path(next_hop: str, *more: dict[str, object]) -> dict[str, object]:
        as_path = {"type": 2, "as_paths": [{"segment_type": 2, "num": 1, "asns": [64513]}]}
        return {
            "attrs": [{"type": 1, "value": 0}, as_path, {"type": 3, "nexthop": next_hop}, *more]
        }

    six = {"type": 14, "nexthop": "2001:db8:1::b", "afi": 2, "safi": 1}
    shown = {
        "203.0.113.10/32": [path("192.0.2.12"), path("192.0.2.11")],
        "203.0.113.11/32": [path("192.0.2.11", {"type": 4, "value": 10}), path("192.0.2.12")],
        "203.0.113.12/32": [path("192.0.2.11", {"type": 5, "value": 200}), path("192.0.2.12")],
        "2001:db8:f::10/128": [{"attrs": [six]}],
        "203.0.113.13/32": [],
    }
    assert routes_of(msgspec.json.encode(shown).decode()) == {
        "203.0.113.10/32": ("192.0.2.11", "192.0.2.12"),
        "203.0.113.11/32": ("192.0.2.12",),
        "203.0.113.12/32": ("192.0.2.11",),
        "2001:db8:f::10/128": ("2001:db8:1::b",),
    }
    assert routes_of("") == {}


@pytest.mark.parametrize(
    ("daemon", "outputs"),
    [("bird", (BIRD_PROTOCOLS, BIRD_BFD)), ("frr", (FRR_SUMMARY, FRR_BFD))],
)
def test_sessions_are_read_from_the_tools_output(daemon: str, outputs: tuple[str, str]) -> None:
    assert sessions(daemon, outputs) == (  # type: ignore[arg-type]
        Session("192.0.2.11", "Established", 4, "up"),
        Session("192.0.2.12", "Active", 0, "down"),
    )


def test_there_are_no_bfd_states_without_bfd() -> None:
    assert sessions("gobgp", (GOBGP_NEIGHBORS,)) == (
        Session("192.0.2.11", "Established", 4),
        Session("192.0.2.12", "Active", 0),
    )
    for daemon, outputs in (
        ("bird", (BIRD_PROTOCOLS, "There is no BFD protocol running.\n")),
        ("frr", (FRR_SUMMARY, "% Unknown command: show bfd peers json\n")),
    ):
        assert {each.bfd for each in sessions(daemon, outputs)} == {""}  # type: ignore[arg-type]


def test_the_lab_configures_the_announcement() -> None:
    routing = Routing(bfd_interval_ms=50)
    for size in (
        Size(),
        Size(announce="l2", lan_clients=1, second_lan=True),
        Size(announce="bgp", routing=routing),
    ):
        text = settings.configuration("/pins", size, size.topology("x"), bird=Path("/bird"))
        config = parse(text, "fairlead.yaml", ["fairlead.io/direct"])
        assert (config.announce.method if config.announce else "none") == size.announce
        assert [pool.auto_assign for pool in config.pools] == [True, False][: len(config.pools)]
        section = yaml.safe_load(text).get("announce", {})
        if size.announce == "bgp":
            assert section["bgp"]["directory"] == "/bird"
            assert [
                (peer["address"], peer["families"], peer["bfd"]["intervalMs"])
                for peer in section["bgp"]["peers"]
            ] == [("192.0.2.1", ["IPv4"], 50), ("2001:db8:1::1", ["IPv6"], 50)]
        assert config.gateway.interfaces == (("eth0", "eth1") if size.second_lan else ("eth0",))
