"""The plan of Services of class proxy: the settings that their annotations select, the ports that
are served, and the findings."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.makers import plan_at_gateway

from fairlead.config import Config, ProxyConfig
from fairlead.errors import Refused
from fairlead.kube.events import MAX_MESSAGE_LENGTH
from fairlead.kube.networks import read_address
from fairlead.kube.objects import EndpointSlice, LoadBalancerIngress, Node, Service, ServicePort
from fairlead.model import DirectSettings, MemberChecks, ProxyHeader, ProxySettings
from fairlead.plan.addresses import address_in, hostname_of
from fairlead.plan.annotations import PROXY_ANNOTATIONS, unknown
from fairlead.plan.balancer import plan_load_balancer
from fairlead.plan.classes import DIRECT, PROXY
from fairlead.plan.proxying import ANNOTATIONS, ended, hostname_suffix, settings_of, switched

OPENSTACK = "loadbalancer.openstack.org/"
FAIRLEAD = "fairlead.io/"


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({}, ProxySettings()),
        ({OPENSTACK + "proxy-protocol": "true"}, ProxySettings(header="v1")),
        ({FAIRLEAD + "proxy-protocol": " V2 "}, ProxySettings(header="v2")),
        (
            {OPENSTACK + "proxy-protocol": "v2", FAIRLEAD + "proxy-protocol": "false"},
            ProxySettings(),
        ),
        ({OPENSTACK + "x-forwarded-for": "True"}, ProxySettings(forwarded_for=True)),
        (
            {
                OPENSTACK + "timeout-client-data": "50000",
                FAIRLEAD + "timeout-member-data": "5m",
                FAIRLEAD + "timeout-tcp-inspect": "0",
            },
            ProxySettings(client_ms=50_000, member_ms=300_000),
        ),
        ({FAIRLEAD + "timeout-member-connect": "1.5s"}, ProxySettings(connect_ms=1500)),
        ({OPENSTACK + "connection-limit": "-1"}, ProxySettings()),
        ({OPENSTACK + "connection-limit": "100"}, ProxySettings(connection_limit=100)),
        ({OPENSTACK + "lb-method": "LEAST_CONNECTIONS"}, ProxySettings(method="leastconn")),
        ({FAIRLEAD + "lb-method": "source-ip"}, ProxySettings(method="source")),
        ({OPENSTACK + "enable-health-monitor": "true"}, ProxySettings(checks=MemberChecks())),
        (
            {FAIRLEAD + "health-monitor-delay": "2"},
            ProxySettings(checks=MemberChecks(interval_ms=2000)),
        ),
        (
            {FAIRLEAD + "health-monitor-delay": "2", FAIRLEAD + "enable-health-monitor": "false"},
            ProxySettings(),
        ),
        ({"metallb.io/allow-shared-ip": "k"}, ProxySettings(shared=True)),
    ],
)
def test_annotations_select_the_settings(
    annotations: dict[str, str], expected: ProxySettings
) -> None:
    assert settings_of(annotations, affinity=False) == (expected, [])


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("proxy-protocol", "v3", "true, v1, v2, false"),
        ("x-forwarded-for", "yes", "true, false"),
        ("timeout-client-data", "soon", "milliseconds from 0"),
        ("timeout-client-data", "1.5", "a duration such as 50s"),
        ("timeout-client-data", "-1", "milliseconds from 0"),
        ("timeout-member-data", "9999999999999", "to 2073600000"),
        ("connection-limit", "many", "from -1 to 1000000"),
        ("connection-limit", "-2", "from -1 to 1000000"),
        ("lb-method", "SOURCE_IP_PORT", "round-robin, least-connections, source-ip"),
        ("health-monitor-max-retries", "11", "from 1 to 10"),
    ],
)
def test_an_invalid_value_is_reported_and_the_other_annotations_apply(
    name: str, value: str, allowed: str
) -> None:
    rest = {FAIRLEAD + "timeout-tcp-inspect": "7"}
    found, notes = settings_of({OPENSTACK + name: value} | rest, affinity=False)
    without, _ = settings_of(rest, affinity=False)
    assert (found.header, found.inspect_ms, found.client_ms) == (
        without.header,
        7,
        without.client_ms,
    )
    [note] = notes
    assert str(note).startswith(f"{OPENSTACK}{name} is {value!r}; allowed: ")
    assert allowed in str(note)


def test_annotations_that_exclude_each_other_are_reported() -> None:
    found, [note] = settings_of(
        {FAIRLEAD + "proxy-protocol": "v2", OPENSTACK + "x-forwarded-for": "true"}, affinity=False
    )
    assert (found.header, found.forwarded_for) == ("v2", False)
    assert str(note).startswith(
        f"{OPENSTACK}x-forwarded-for has no effect together with {FAIRLEAD}proxy-protocol"
    )
    found, [note, _] = settings_of({FAIRLEAD + "lb-method": "least-connections"}, affinity=True)
    assert found.method == "source"
    assert "sessionAffinity" in str(note)


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(ANNOTATIONS),
        st.text() | st.integers().map(str) | st.sampled_from(["true", "v2", "5s"]),
    )
)
def test_settings_are_within_their_limits_whatever_the_annotations_contain(
    annotations: dict[str, str],
) -> None:
    found, _ = settings_of(annotations, affinity=False)
    for time_ms in (found.client_ms, found.connect_ms, found.member_ms, found.inspect_ms):
        assert 0 <= time_ms <= 2_073_600_000
    assert not (found.header and found.forwarded_for)
    assert found.checks is None or (found.checks.rise, found.checks.fall) <= (10, 10)


def test_a_misspelled_annotation_is_reported_with_the_known_name() -> None:
    [note] = unknown(
        {
            "fairlead.io/proxi-protocol": "v2",
            "fairlead.io/addresses": "203.0.113.7",
            "example.com/x": "y",
        }
    )
    assert str(note) == (
        "unknown annotation fairlead.io/proxi-protocol ('v2'); did you mean "
        "fairlead.io/proxy-protocol?"
    )


def test_one_finding_names_the_first_of_many_unknown_annotations() -> None:
    [note] = unknown({f"fairlead.io/drain-timeou{number:04}": "x" for number in range(5000)})
    assert str(note) == (
        "unknown annotations fairlead.io/drain-timeou0000 ('x'), fairlead.io/drain-timeou0001 "
        "('x'), fairlead.io/drain-timeou0002 ('x') and 4,997 more; did you mean "
        "fairlead.io/drain-timeout?"
    )


def test_an_unknown_annotation_that_resembles_none_is_reported_with_all_known_ones() -> None:
    [note] = unknown({f"fairlead.io/{'z' * 40}": "1"})
    assert note.remedy.startswith("known after fairlead.io/: address-pool, addresses, ")
    assert len(str(note)) <= MAX_MESSAGE_LENGTH


@pytest.mark.parametrize(
    ("annotations", "header", "configured", "suffix"),
    [
        ({}, "v2", "", ""),
        ({}, "v2", "nip.io", "nip.io"),
        ({}, "", "nip.io", ""),
        ({FAIRLEAD + "hostname-suffix": "none"}, "v2", "nip.io", ""),
        ({FAIRLEAD + "hostname-suffix": "LB.example.com."}, "", "", "lb.example.com"),
        ({FAIRLEAD + "hostname-suffix": "not a name"}, "v2", "nip.io", "nip.io"),
    ],
)
def test_the_hostname_suffix_of_a_service(
    annotations: dict[str, str], header: str, configured: str, suffix: str
) -> None:
    found, notes = hostname_suffix(
        annotations, ProxySettings(header="v2" if header else ""), configured
    )
    assert found == suffix
    assert len(notes) == ("not a name" in annotations.values())


@given(st.ip_addresses().map(str).filter(lambda text: read_address(text) == text))
def test_the_address_is_read_back_from_its_hostname(text: str) -> None:
    assert address_in(hostname_of(text, "lb.example.com")) == text


@pytest.mark.parametrize(
    "name", ["lb.example.com", "a-b.example.com", "203.0.113.7", "1.2.3.example.com", ""]
)
def test_other_hostnames_contain_no_address(name: str) -> None:
    assert address_in(name) is None


def test_annotations_of_class_proxy_have_an_effect_only_in_class_proxy(
    make_service: Callable[..., Service],
    make_slice: Callable[..., EndpointSlice],
    nodes: dict[str, Node],
) -> None:
    slices = [make_slice([("10.244.1.2", "node1", "ready"), ("10.244.1.3", "node1", "ready")])]
    made = make_service(
        annotations={
            OPENSTACK + "proxy-protocol": "v2",
            OPENSTACK + "flavor-id": "x",
            FAIRLEAD + "drian": "1",
        }
    )
    planned = plan_load_balancer(
        made, slices, nodes, ["203.0.113.7"], PROXY, config=Config(proxy=ProxyConfig("nip.io"))
    )
    assert (planned.ip_mode, planned.hostname_suffix) == ("Proxy", "nip.io")
    assert planned.settings == ProxySettings(header="v2")
    [listener] = planned.listeners
    assert [(each.node, each.weight) for each in listener.members] == [("node1", 2)]
    assert {note.code for note in planned.notes} == {
        "AnnotationWithoutEffect",
        "AnnotationNotUnderstood",
    }
    assert not any("proxy-protocol has" in str(note) for note in planned.notes)
    direct = plan_load_balancer(made, slices, nodes, ["203.0.113.7"], DIRECT)
    assert (direct.ip_mode, direct.settings) == ("VIP", DirectSettings())
    assert any(f"{OPENSTACK}proxy-protocol has no effect" in str(note) for note in direct.notes)


def test_a_service_with_session_affinity_is_reported_to_have_affinity_by_gateway(
    make_service: Callable[..., Service],
    make_slice: Callable[..., EndpointSlice],
    nodes: dict[str, Node],
) -> None:
    made = make_service(
        session_affinity="ClientIP", annotations={FAIRLEAD + "lb-method": "source-ip"}
    )
    slices = [make_slice([("10.244.1.2", "node1", "ready")])]
    planned = plan_load_balancer(made, slices, nodes, ["203.0.113.7"], PROXY)
    [note] = planned.notes
    assert note.code == "AffinityByGateway"
    for words in (
        "connections of a gateway to one pod",
        "set fairlead.io/lb-method to source-ip",
        "fairlead.io/direct",
    ):
        assert words in str(note)
    assert (
        plan_at_gateway(
            made, slices, nodes, ["203.0.113.7"], PROXY, lambda _address, _port: "up"
        ).notes
        == ()
    )
    assert plan_load_balancer(make_service(), slices, nodes, ["203.0.113.7"], PROXY).notes == ()


def test_a_gateway_serves_an_address_that_is_published_as_a_hostname(
    make_service: Callable[..., Service],
    make_slice: Callable[..., EndpointSlice],
    nodes: dict[str, Node],
) -> None:
    from msgspec.structs import replace

    from fairlead.plan.addresses import held_by

    made = make_service()
    entry = LoadBalancerIngress("", "203.0.113.7.nip.io")
    shown = replace(
        made,
        status=replace(
            made.status, load_balancer=replace(made.status.load_balancer, ingress=(entry,))
        ),
    )
    assert held_by(shown) == ("203.0.113.7",)
    planned = plan_at_gateway(
        shown, [make_slice([])], nodes, held_by(shown), PROXY, lambda _address, _port: "up"
    )
    assert [each.port for each in planned.listeners] == [80]


def test_ports_that_a_proxy_cannot_serve_are_reported(
    make_service: Callable[..., Service],
    make_slice: Callable[..., EndpointSlice],
    nodes: dict[str, Node],
) -> None:
    ports = (
        ServicePort(80, "web", node_port=30080),
        ServicePort(53, "dns", "UDP", node_port=30053),
        ServicePort(81, "x"),
    )
    planned = plan_load_balancer(
        make_service(ports=ports), [make_slice([])], nodes, ["203.0.113.7"], PROXY
    )
    assert [each.port for each in planned.listeners] == [80]
    assert [(each.port, each.error) for each in planned.unserved_ports] == [
        (53, "fairlead.io/ProtocolNotSupported"),
        (81, "fairlead.io/NodePortMissing"),
    ]
    messages = {note.code: str(note) for note in planned.notes}
    assert "53/UDP" in messages["ProtocolNotSupported"]
    assert DIRECT.name in messages["ProtocolNotSupported"]
    with pytest.raises(Refused, match=r"53/UDP.*fairlead\.io/direct"):
        plan_load_balancer(make_service(ports=ports[1:2]), [], nodes, ["203.0.113.7"], PROXY)


def test_gateways_read_every_annotation_of_class_proxy() -> None:
    assert {FAIRLEAD + name for name in PROXY_ANNOTATIONS} | {
        OPENSTACK + name for name in PROXY_ANNOTATIONS
    } < set(ANNOTATIONS)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            "",
            "v2",
            (
                "with a PROXY header v2",
                "open connections keep no PROXY header",
                "with and without a header, and may require",
            ),
        ),
        ("v1", "", ("with no PROXY header", "keep a PROXY header v1", "stop expecting")),
        ("v1", "v2", ("with a PROXY header v2", "already accept both versions")),
    ],
)
def test_the_finding_about_a_changed_header_tells_what_to_change_in_which_order(
    before: ProxyHeader, after: ProxyHeader, words: tuple[str, ...]
) -> None:
    note = switched(before, after)
    assert [word for word in (*words, "a second Service") if word not in str(note)] == []
    assert len(str(note)) < 500


def test_the_finding_about_ended_connections_tells_the_limit() -> None:
    assert ended(1, 20).message.startswith("1 connection was ended, with a worker ")
    assert [
        word
        for word in ("7 connections were", "at most 20 of its old", "gateway.proxyOldWorkers")
        if word not in ended(7, 20).message
    ] == []
