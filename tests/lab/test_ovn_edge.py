"""The routers of OVN of a lab: their commands, what they can be combined with, what is shown of
them."""

from pathlib import Path

import msgspec
import pytest

from fairlead.config import parse
from fairlead.drivers.ovn.marks import SERVICE, VIP
from fairlead.errors import Refused
from fairlead.lab import settings
from fairlead.lab.ovn import edge, programs, routers
from fairlead.lab.ovn.view import BalancerView, rows_of
from fairlead.lab.rundir import Ovn, Size

SIZE = Size(nodes=2, gateways=0, default_class="ovn", ovn=Ovn())
GATEWAYS = msgspec.structs.replace(SIZE, ovn=Ovn(topology="gateways"))


def test_the_router_can_be_on_any_chassis_and_prefers_the_first() -> None:
    commands = list(routers.commands(SIZE.topology("x")))
    places = [each for each in commands if each[0] == "lrp-set-gateway-chassis"]
    assert [each[2:] for each in places] == [
        ("chassis1", "3"),
        ("chassis2", "2"),
        ("chassis3", "1"),
    ]


def test_the_router_reaches_pods_by_their_nodes_and_everything_else_by_the_router_of_the_lab() -> (
    None
):
    commands = list(routers.commands(SIZE.topology("x")))
    assert [each[2:] for each in commands if each[0] == "lr-route-add"] == [
        ("0.0.0.0/0", "192.0.2.1"),
        ("::/0", "2001:db8:1::1"),
        ("10.244.1.0/24", "192.0.2.21"),
        ("2001:db8:244:1::/64", "2001:db8:1::15"),
        ("10.244.2.0/24", "192.0.2.22"),
        ("2001:db8:244:2::/64", "2001:db8:1::16"),
    ]


def test_the_nodes_send_replies_to_the_router_and_other_hosts_do_not() -> None:
    topology = SIZE.topology("x")
    defaults = {host.name: topology.default_routers(host) for host in topology.hosts}
    assert defaults["node1"] == ("192.0.2.2", "2001:db8:1::2")
    assert defaults["control"] == ("192.0.2.1", "2001:db8:1::1")
    assert defaults["client1"] == ("198.51.100.1", "2001:db8:2::1")
    without = Size(nodes=1).topology("x")
    assert without.default_routers(without.host("node1")) == ("192.0.2.1", "2001:db8:1::1")


def test_the_gateway_router_of_a_node_is_on_its_chassis_and_sends_to_its_pods() -> None:
    topology = GATEWAYS.topology("x")
    commands = list(routers.commands(topology))
    assert [each[2:4] for each in commands if each[:2] == ("set", "logical_router")] == [
        ("GR_node1", "options:chassis=chassis1"),
        ("GR_node2", "options:chassis=chassis2"),
    ]
    assert [each[1:] for each in commands if each[0] == "lr-route-add" and "GR_node2" in each] == [
        ("GR_node2", "0.0.0.0/0", "192.0.2.1"),
        ("GR_node2", "::/0", "2001:db8:1::1"),
        ("GR_node2", "10.244.2.0/24", "192.0.2.22"),
        ("GR_node2", "2001:db8:244:2::/64", "2001:db8:1::16"),
    ]
    assert topology.default_routers(topology.host("node2")) == ("192.0.2.232", "2001:db8:1::e8")


def test_the_configuration_names_the_gateway_routers() -> None:
    text = settings.configuration("/pins", GATEWAYS, GATEWAYS.topology("x"))
    config = parse(text, "fairlead.yaml", ["fairlead.io/ovn"])
    assert config.ovn is not None
    assert (config.ovn.topology, config.ovn.routers) == ("gateways", "GR_{node}")


def test_the_configuration_has_the_section_ovn() -> None:
    size = msgspec.structs.replace(SIZE, ovn=Ovn(backends="nodePorts"))
    text = settings.configuration("/pins", size, size.topology("x"))
    config = parse(text, "fairlead.yaml", ["fairlead.io/ovn"])
    assert config.default_class == "fairlead.io/ovn"
    assert config.ovn is not None
    assert (config.ovn.router, config.ovn.backends) == (routers.EDGE, "nodePorts")
    assert config.ovn.northbound == ("unix:/run/fairlead/lab/x/ovn/central/nb.sock",)


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"gateways": 1}, "leave out --gateways"),
        ({"gateways_on_nodes": True}, "leave out --gateways"),
        ({"announce": "bgp"}, "leave out --announce"),
        ({"far_nodes": 1}, "leave out --far-nodes"),
        ({"lan_clients": 1}, "leave out --far-nodes and --lan-clients"),
        ({"ovn": None}, "add --ovn router or --ovn gateways"),
        ({"ovn": Ovn(topology="gateways", backends="nodePorts")}, "leave out --ovn-backends"),
    ],
)
def test_what_does_not_work_with_ovn_is_refused(fields: dict[str, object], fix: str) -> None:
    edge.check(SIZE)
    with pytest.raises(Refused) as refused:
        edge.check(msgspec.structs.replace(SIZE, **fields))
    assert fix in refused.value.fix


def test_each_key_of_a_row_is_shown_with_its_backends_and_its_state() -> None:
    vips = {
        "203.0.113.10:80": "10.244.1.2:8080,10.244.1.2:8080,10.244.2.2:8080",
        "192.0.0.8:77": "10.244.1.3:8080",
    }
    marks = {SERVICE: "default/one", VIP: "203.0.113.10:80"}
    more = {"[2001:db8:f::10]:53": ""}, {"203.0.113.11:80": ""}
    rows = [
        {"_uuid": "u1", "name": "1", "protocol": "tcp", "vips": vips, "external_ids": marks},
        {"_uuid": "u2", "name": "two", "protocol": "udp", "vips": more[0], "external_ids": {}},
        {"_uuid": "u3", "name": "three", "protocol": [], "vips": more[1], "external_ids": {}},
    ]
    found = rows_of([{"name": "edge", "load_balancer": ["u1", "u2"]}], rows)
    assert found[0] == BalancerView(
        "default/one",
        "tcp",
        "203.0.113.10:80",
        {"10.244.1.2:8080": 2, "10.244.2.2:8080": 1},
        draining=False,
        routers=("edge",),
    )
    assert [(row.owner, row.protocol, row.state) for row in found] == [
        ("default/one", "tcp", "serving"),
        ("default/one", "tcp", "draining"),
        ("three", "tcp", "not attached"),
        ("two", "udp", "refusing"),
    ]
    both = [{"name": name, "load_balancer": "u2"} for name in ("GR_b", "GR_a")]
    assert rows_of(both, rows[1:2])[0].routers == ("GR_a", "GR_b")


def test_a_missing_program_is_reported_with_the_packages_of_debian(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(programs, "CACHE", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match="ovn-northd is neither on the PATH") as refused:
        programs.program("ovn-northd")
    assert "ovn-central ovn-host openvswitch-switch" in refused.value.fix
