"""The plan of Services of class octavia: the provider, the settings that their annotations select,
the members, and the findings."""

from collections.abc import Callable, Mapping

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.config import Config
from fairlead.drivers.publish import _ingress_of
from fairlead.errors import Refused
from fairlead.kube.objects import (
    EndpointPort,
    EndpointSlice,
    LoadBalancerIngress,
    LoadBalancerStatus,
    Node,
    ObjectKey,
    Service,
    ServicePort,
    ServiceStatus,
)
from fairlead.model import (
    ExistingLoadBalancer,
    FloatingIpRequest,
    LoadBalancer,
    OctaviaChecks,
    OctaviaPlace,
    OctaviaSettings,
    Provider,
    ServiceKey,
)
from fairlead.plan.annotations import OCTAVIA_ANNOTATIONS, PROXY_ANNOTATIONS
from fairlead.plan.capabilities import METHODS, UNSUPPORTED
from fairlead.plan.cloud import plan_cloud
from fairlead.plan.octavia import OctaviaRequest, settings_of
from fairlead.sections import OctaviaClassConfig, OctaviaConfig, OctaviaMonitorConfig
from fairlead.state import State

OPENSTACK = "loadbalancer.openstack.org/"
FAIRLEAD = "fairlead.io/"
CONFIG = OctaviaConfig(subnet_id="subnet")
LOCAL = OctaviaRequest(local=True, health_port=32000, protocols=["TCP"], restricted=False)
CLUSTER = LOCAL._replace(local=False, health_port=0)


def read(
    annotations: Mapping[str, str],
    requested: OctaviaRequest = LOCAL,
    existing: Provider | None = None,
    **config: object,
) -> tuple[OctaviaSettings, list[str]]:
    found, notes = settings_of(
        annotations, requested, msgspec.structs.replace(CONFIG, **config), existing
    )
    return found, [f"{note.code}: {note}" for note in notes]


@pytest.mark.parametrize(
    ("annotations", "requested", "provider", "reason"),
    [
        ({}, LOCAL, "ovn", "pods must see the client's address"),
        ({}, CLUSTER, "amphora", "pods need not see the client's address"),
        (
            {OPENSTACK + "proxy-protocol": "true"},
            LOCAL,
            "amphora",
            f"provider ovn does not support {OPENSTACK}proxy-protocol",
        ),
        ({OPENSTACK + "proxy-protocol": "false"}, LOCAL, "ovn", "externalTrafficPolicy Local"),
        ({FAIRLEAD + "timeout-client-data": "5m"}, LOCAL, "amphora", "timeout-client-data"),
        ({}, LOCAL._replace(restricted=True), "amphora", "spec.loadBalancerSourceRanges"),
        ({FAIRLEAD + "lb-method": "LEAST_CONNECTIONS"}, LOCAL, "amphora", "lb-method"),
        (
            {FAIRLEAD + "lb-method": "SOURCE_IP_PORT"},
            CLUSTER,
            "ovn",
            "provider amphora does not support this value of fairlead.io/lb-method",
        ),
        (
            {FAIRLEAD + "octavia-provider": "amphora"},
            LOCAL,
            "amphora",
            "fairlead.io/octavia-provider selects it",
        ),
    ],
)
def test_the_provider_supports_the_requested_features(
    annotations: dict[str, str], requested: OctaviaRequest, provider: Provider, reason: str
) -> None:
    found, _ = read(annotations, requested)
    assert found.provider == provider
    assert reason in found.why


def test_the_provider_of_an_existing_load_balancer_does_not_change() -> None:
    found, notes = read({FAIRLEAD + "octavia-provider": "ovn"}, CLUSTER, "amphora")
    assert found.provider == "amphora"
    assert any("cannot change; recreate the Service" in note for note in notes)
    assert read({}, LOCAL, "amphora", provider="ovn")[0].provider == "amphora"


@pytest.mark.parametrize(
    ("annotations", "requested", "existing", "words"),
    [
        (
            {OPENSTACK + "proxy-protocol": "v2"},
            LOCAL,
            "ovn",
            "get no header; remove it, or recreate the Service with",
        ),
        ({OPENSTACK + "x-forwarded-for": "true"}, LOCAL, "ovn", f"{OPENSTACK}x-forwarded-for: "),
        (
            {},
            LOCAL._replace(restricted=True),
            "ovn",
            "spec.loadBalancerSourceRanges: provider ovn admits every client",
        ),
    ],
)
def test_a_service_that_needs_a_feature_which_its_provider_lacks_is_refused(
    annotations: dict[str, str], requested: OctaviaRequest, existing: Provider, words: str
) -> None:
    with pytest.raises(Refused) as error:
        read(annotations, requested, existing)
    assert words in str(error.value)
    assert "fairlead.io/octavia-provider: amphora" in str(error.value)


def test_other_annotations_that_the_provider_does_not_support_are_reported() -> None:
    annotations = {
        OPENSTACK + "timeout-client-data": "50000",
        OPENSTACK + "connection-limit": "5",
        OPENSTACK + "flavor-id": "large",
        OPENSTACK + "lb-method": "ROUND_ROBIN",
    }
    found, notes = read(annotations, LOCAL, "ovn")
    assert (found.client_ms, found.connection_limit, found.place.flavor_id) == (None, -1, "")
    assert found.method == "SOURCE_IP_PORT"
    assert len([note for note in notes if note.startswith("AnnotationWithoutEffect")]) == 4


def test_timeouts_are_set_only_if_the_service_requests_them() -> None:
    found, _ = read({}, CLUSTER)
    assert (found.client_ms, found.connect_ms, found.member_ms, found.inspect_ms) == (None,) * 4
    assert read({FAIRLEAD + "timeout-tcp-inspect": "0"}, CLUSTER)[0].inspect_ms == 0


@pytest.mark.parametrize(
    ("annotations", "requested", "provider", "monitor_types"),
    [
        ({}, LOCAL, "amphora", {"TCP": "HTTP"}),
        ({}, LOCAL._replace(protocols=["TCP", "UDP"]), "amphora", {"TCP": "HTTP", "UDP": "HTTP"}),
        ({}, CLUSTER, "amphora", {"TCP": "TCP"}),
        ({}, LOCAL, "ovn", {"TCP": "TCP"}),
        ({}, LOCAL._replace(protocols=["UDP"]), "ovn", {}),
        (
            {OPENSTACK + "enable-health-monitor": "true"},
            LOCAL._replace(protocols=["UDP"]),
            "ovn",
            {"UDP": "UDP-CONNECT"},
        ),
        ({OPENSTACK + "enable-health-monitor": "false"}, LOCAL, "amphora", {}),
    ],
)
def test_the_types_of_health_monitors_are_those_that_the_provider_supports(
    annotations: dict[str, str],
    requested: OctaviaRequest,
    provider: Provider,
    monitor_types: dict[str, str],
) -> None:
    found, _ = read(annotations, requested, provider)
    assert dict(found.monitor_types) == monitor_types
    assert (found.checks is not None) == bool(monitor_types)


def test_the_configuration_gives_the_values_that_annotations_do_not_set() -> None:
    monitor = OctaviaMonitorConfig(delay_s=7, max_retries_down=2)
    annotations = {OPENSTACK + "network-id": "other", FAIRLEAD + "health-monitor-timeout": "2"}
    found, _ = read(
        annotations,
        monitor=monitor,
        flavor_id="small",
        member_subnet_id="nodes",
        provider="amphora",
    )
    assert found.checks == OctaviaChecks(7, 2, 1, 2)
    assert found.place == OctaviaPlace(network_id="other", flavor_id="small")
    assert found.member_subnet_id == "nodes"
    with pytest.raises(Refused, match=r"octavia\.subnetId"):
        read({}, subnet_id="")


@given(
    annotations=st.dictionaries(
        st.sampled_from(
            [
                prefix + name
                for prefix in (FAIRLEAD, OPENSTACK)
                for name in (*PROXY_ANNOTATIONS, *OCTAVIA_ANNOTATIONS)
            ]
        ),
        st.one_of(
            st.sampled_from(["true", "v2", "ovn", "amphora", "5m", "100", "-1", "SOURCE_IP", ""]),
            st.text(max_size=9),
        ),
    ),
    requested=st.builds(
        OctaviaRequest,
        st.booleans(),
        st.sampled_from([0, 32000]),
        st.lists(st.sampled_from(["TCP", "UDP", "SCTP"]), min_size=1, unique=True),
        st.booleans(),
    ),
    existing=st.sampled_from([None, "amphora", "ovn"]),
)
@settings(max_examples=300, deadline=None)
def test_the_settings_contain_nothing_that_the_provider_lacks(
    annotations: dict[str, str], requested: OctaviaRequest, existing: Provider | None
) -> None:
    try:
        found, _ = settings_of(annotations, requested, CONFIG, existing)
    except Refused:
        return
    assert found.provider == existing or existing is None
    assert found.method in METHODS[found.provider]
    if found.provider == "ovn":
        assert set(UNSUPPORTED["ovn"]) > {"proxy-protocol"}
        assert (found.header, found.forwarded_for, found.connection_limit, found.client_ms) == (
            "",
            False,
            -1,
            None,
        )
        assert not requested.restricted
        assert not found.place.flavor_id


def existing_of(service: Service, provider: Provider) -> ExistingLoadBalancer:
    """Return an existing load balancer of the Service."""
    return ExistingLoadBalancer(service.metadata.uid, provider, ("10.0.0.7",))


def planned(
    service: Service,
    slices: list[EndpointSlice],
    nodes: dict[str, Node],
    octavia: OctaviaConfig = CONFIG,
    existing: ExistingLoadBalancer | None = None,
) -> LoadBalancer:
    state = State(())
    state.update_services({ObjectKey(*service.key): service})
    state.update_slices({ObjectKey("default", each.metadata.name): each for each in slices})
    state.update_nodes({ObjectKey("", name): node for name, node in nodes.items()})
    config = Config(default_class="fairlead.io/octavia", octavia=octavia)
    state.observe_load_balancer(service.key, existing)
    found = plan_cloud(state, config, [service.key])[service.key]
    if isinstance(found, Refused):
        raise found
    return found


def test_two_nodes_with_one_address_are_reported(
    make_service: Callable[..., Service],
    make_slice: Callable[..., EndpointSlice],
    nodes: dict[str, Node],
) -> None:
    nodes["node2"] = msgspec.structs.replace(nodes["node2"], status=nodes["node1"].status)
    rows = [("10.0.1.1", "node1", "ready"), ("10.0.2.1", "node2", "ready")]
    found = planned(make_service(), [make_slice(rows)], nodes)
    (note,) = found.notes
    assert note.code == "NodesShareAddress"
    assert "node1 and node2 have one InternalIP, 192.0.2.21" in note.message


def test_members_are_nodes_with_ready_pods_weighted_by_their_number(
    make_service: Callable[..., Service],
    make_slice: Callable[..., EndpointSlice],
    nodes: dict[str, Node],
) -> None:
    rows = [
        ("10.0.1.1", "node1", "ready"),
        ("10.0.1.2", "node1", "ready"),
        ("10.0.2.1", "node2", "ready"),
    ]
    found = planned(make_service(), [make_slice(rows)], nodes)
    (listener,) = found.listeners
    assert [(each.node, each.weight, each.state) for each in listener.members] == [
        ("node1", 2, "active"),
        ("node2", 1, "active"),
    ]
    assert [note.code for note in found.notes] == ["SharesByNode"]
    assert found.ip_mode == "VIP"
    amphora = msgspec.structs.replace(CONFIG, provider="amphora", ip_mode="Proxy")
    found = planned(make_service(), [make_slice(rows)], nodes, amphora)
    assert [note.code for note in found.notes] == ["ClientAddressHidden"]
    assert found.ip_mode == "Proxy"


def test_a_port_without_a_node_port_is_not_served(
    make_service: Callable[..., Service],
    make_slice: Callable[..., EndpointSlice],
    nodes: dict[str, Node],
) -> None:
    slices = [make_slice([("10.0.1.1", "node1", "ready")], ports=(("a", 1), ("b", 2)))]
    ports = (ServicePort(80, name="a", node_port=30080), ServicePort(81, name="b"))
    found = planned(make_service(ports=ports), slices, nodes)
    assert [each.port for each in found.listeners] == [80]
    assert [(each.port, each.error) for each in found.unserved_ports] == [
        (81, "fairlead.io/NodePortMissing")
    ]
    with pytest.raises(Refused, match="allocateLoadBalancerNodePorts"):
        planned(make_service(ports=ports[1:]), slices, nodes)


def test_both_families_are_served_if_each_has_a_subnet(
    make_service: Callable[..., Service],
    make_slice: Callable[..., EndpointSlice],
    nodes: dict[str, Node],
) -> None:
    slices = [
        make_slice([("10.0.1.1", "node1", "ready")]),
        make_slice([("fd00::1", "node1", "ready")], name="web-6", family="IPv6"),
    ]
    with_both = msgspec.structs.replace(CONFIG, subnet_id_v6="sixth", floating_network_id="outside")
    requested = {"fairlead.io/addresses": "fd00:9::9"}
    both = make_service(ip_families=("IPv6", "IPv4"), annotations=requested)
    must = make_service(ip_families=("IPv4", "IPv6"), ip_family_policy="RequireDualStack")

    def skipped_families(found: LoadBalancer) -> list[str]:
        return [str(note) for note in found.notes if note.code == "AddressFamilySkipped"]

    for service in (both, must):
        found = planned(service, slices, nodes, with_both)
        assert {each.family for each in found.listeners} == {"IPv4", "IPv6"}
        assert isinstance(found.settings, OctaviaSettings)
        assert (found.settings.place.subnet_id, found.settings.place.subnet_id_v6) == (
            "subnet",
            "sixth",
        )
        assert found.settings.floating == FloatingIpRequest("outside")
        assert skipped_families(found) == []
    found = planned(both, slices, nodes, with_both)
    assert isinstance(found.settings, OctaviaSettings)
    assert (found.settings.place.address, found.settings.place.address_v6) == ("", "fd00:9::9")
    # An existing load balancer keeps its address families.
    for service in (both, must):
        found = planned(service, slices, nodes, with_both, existing_of(service, "ovn"))
        assert {each.family for each in found.listeners} == {"IPv4"}
        assert skipped_families(found) == [
            "class fairlead.io/octavia serves only IPv4: its load balancer has only addresses "
            "of IPv4, and that cannot change; recreate the Service to change it"
        ]
    # The configuration has no subnet for IPv6.
    (message,) = skipped_families(planned(both, slices, nodes))
    assert "serves only IPv6: the configuration has no octavia.subnetIdV6" in message
    with pytest.raises(
        Refused,
        match=r"cannot serve both address families: the configuration has no octavia\.subnetIdV6",
    ):
        planned(must, slices, nodes)
    placed = make_service(ip_families=("IPv4", "IPv6"), annotations={FAIRLEAD + "subnet-id": "own"})
    (message,) = skipped_families(planned(placed, slices, nodes, with_both))
    assert (
        "serves only IPv4: fairlead.io/subnet-id selects the place of a single address" in message
    )
    alone = planned(make_service(ip_families=("IPv6",)), slices, nodes, with_both)
    assert isinstance(alone.settings, OctaviaSettings)
    assert (alone.settings.place, alone.settings.floating) == (OctaviaPlace("sixth"), None)


def test_the_settings_of_a_configured_class_override_the_general_ones() -> None:
    classes = {
        "inner": OctaviaClassConfig(network_id="inner"),
        "members": OctaviaClassConfig(member_subnet_id="racks"),
    }
    found, _ = read({OPENSTACK + "class": "inner"}, classes=classes, member_subnet_id="nodes")
    assert (found.place, found.member_subnet_id) == (OctaviaPlace(network_id="inner"), "nodes")
    found, _ = read(
        {OPENSTACK + "class": "members", FAIRLEAD + "subnet-id": "mine"}, classes=classes
    )
    assert (found.place, found.member_subnet_id) == (OctaviaPlace("mine"), "racks")
    outer = OctaviaClassConfig(floating_network_id="outer", floating_subnet="pool-*")
    for network in ("", "general"):
        found, _ = read(
            {OPENSTACK + "class": "outer"},
            classes={"outer": outer},
            floating_network_id=network,
            floating_subnet_tags="big",
        )
        assert found.floating == FloatingIpRequest("outer", subnet="pool-*")
    assert (
        CONFIG.uses_floating_ips,
        OctaviaConfig(classes={"outer": outer}).uses_floating_ips,
    ) == (False, True)
    found, _ = read(
        {OPENSTACK + "class": "inner"},
        classes=classes,
        floating_network_id="general",
        floating_subnet_tags="big",
    )
    assert found.floating == FloatingIpRequest("general", subnet_tags="big")
    found, notes = read(
        {FAIRLEAD + "class": "fairlead.io/octavia"}, classes=classes, member_subnet_id="nodes"
    )
    assert (found.member_subnet_id, notes) == (
        "nodes",
        [],
    )  # the claim annotation of the controller
    with pytest.raises(
        Refused, match=r"no such class \(inner, members\); name a class of octavia\.classes"
    ):
        read({OPENSTACK + "class": "outer"}, classes=classes)


def test_the_configured_lb_method_is_used_if_the_provider_supports_it() -> None:
    assert read({}, CLUSTER, lb_method="LEAST_CONNECTIONS")[0].method == "LEAST_CONNECTIONS"
    assert read({}, LOCAL, lb_method="LEAST_CONNECTIONS")[0].method == "SOURCE_IP_PORT"
    assert (
        read({FAIRLEAD + "lb-method": "source-ip"}, CLUSTER, lb_method="LEAST_CONNECTIONS")[
            0
        ].method
        == "SOURCE_IP"
    )


def test_termination_of_tls_is_refused() -> None:
    with pytest.raises(
        Refused,
        match="do not terminate TLS; remove it, and let an ingress controller terminate TLS",
    ):
        read({OPENSTACK + "default-tls-container-ref": "https://keys/1"})


def test_only_nodes_that_match_the_node_selector_are_members(
    make_service: Callable[..., Service],
    make_slice: Callable[..., EndpointSlice],
    nodes: dict[str, Node],
) -> None:
    slices = [make_slice([("10.0.1.1", "node1", "ready"), ("10.0.2.1", "node2", "ready")])]
    name = min(nodes)
    labels = {"zone": "a", "disk": ""}
    metadata = msgspec.structs.replace(nodes[name].metadata, labels=labels)
    chosen = nodes | {name: msgspec.structs.replace(nodes[name], metadata=metadata)}

    def members(selector: str) -> list[str]:
        service = make_service(annotations={OPENSTACK + "node-selector": selector})
        found = planned(service, slices, chosen)
        return [each.node for each in found.listeners[0].members]

    assert members("zone=a,disk") == [name]
    assert members("zone=a, zone") == [name]
    assert members("zone=b") == []
    with pytest.raises(Refused, match="zone=a,disk"):
        members("?")
    service = make_service(annotations={FAIRLEAD + "node-selector": "zone=b"})
    assert "NoNodeSelected" in [note.code for note in planned(service, slices, chosen).notes]
    octavia = msgspec.structs.replace(CONFIG, node_selector="zone=a")
    assert [
        each.node for each in planned(make_service(), slices, chosen, octavia).listeners[0].members
    ] == [name]


def test_all_nodes_are_members_only_if_a_health_monitor_probes_them(
    make_service: Callable[..., Service],
    make_slice: Callable[..., EndpointSlice],
    nodes: dict[str, Node],
) -> None:
    slices = [make_slice([("10.0.1.1", "node1", "ready")])]
    found = planned(make_service(annotations={FAIRLEAD + "members": "all"}), slices, nodes)
    assert [(each.node, each.weight) for each in found.listeners[0].members] == [
        (name, 1) for name in sorted(nodes)
    ]
    annotations = {FAIRLEAD + "members": "all", FAIRLEAD + "enable-health-monitor": "false"}
    found = planned(make_service(annotations=annotations), slices, nodes)
    assert [each.node for each in found.listeners[0].members] == ["node1"]
    assert any("fairlead.io/members has no effect over TCP" in str(note) for note in found.notes)


@pytest.mark.parametrize("monitor", [{}, {FAIRLEAD + "enable-health-monitor": "true"}])
def test_all_nodes_are_members_only_of_ports_with_a_health_monitor_over_http_or_tcp(
    monitor: dict[str, str],
    make_service: Callable[..., Service],
    make_slice: Callable[..., EndpointSlice],
    nodes: dict[str, Node],
) -> None:
    """Provider ovn does not probe UDP ports, or probes them by UDP-CONNECT, which does not detect a
    node that drops packets."""
    ports = (
        ServicePort(80, name="web", node_port=30080),
        ServicePort(53, name="dns", protocol="UDP", node_port=30053),
        ServicePort(36412, name="s1", protocol="SCTP", node_port=30036),
    )
    ready = make_slice([("10.0.1.1", "node1", "ready")])
    endpoints = tuple(EndpointPort(port.name, port.port, port.protocol) for port in ports)
    slices = [msgspec.structs.replace(ready, ports=endpoints)]
    service = make_service(
        ports=ports,
        external_traffic_policy="Local",
        annotations={FAIRLEAD + "members": "all", FAIRLEAD + "octavia-provider": "ovn"} | monitor,
    )
    found = planned(service, slices, nodes)
    assert {
        each.protocol: [member.node for member in each.members] for each in found.listeners
    } == {
        "TCP": sorted(nodes),
        "UDP": ["node1"],
        "SCTP": ["node1"],
    }
    (message,) = [str(note) for note in found.notes if "io/members" in str(note)]
    assert message.startswith("fairlead.io/members has no effect over SCTP, UDP: ")
    amphora = planned(service, slices, nodes, existing=existing_of(service, "amphora"))
    assert all(
        [member.node for member in each.members] == sorted(nodes) for each in amphora.listeners
    )


def test_the_hostname_annotation_is_published_instead_of_the_address(
    make_service: Callable[..., Service],
    make_slice: Callable[..., EndpointSlice],
    nodes: dict[str, Node],
) -> None:
    found = planned(
        make_service(annotations={OPENSTACK + "hostname": "www.example.org"}), [], nodes
    )
    located = msgspec.structs.replace(found, addresses=("198.51.100.1",))
    assert [(each.ip, each.hostname) for each in _ingress_of(located)] == [("", "www.example.org")]
    assert _ingress_of(found) == ()
    with pytest.raises(Refused, match="allowed: a DNS name"):
        planned(make_service(annotations={OPENSTACK + "hostname": "no name"}), [], nodes)


def test_an_invalid_id_of_a_load_balancer_is_refused(
    make_service: Callable[..., Service], nodes: dict[str, Node]
) -> None:
    with pytest.raises(Refused, match="allowed: the id of a load balancer"):
        planned(make_service(annotations={OPENSTACK + "load-balancer-id": "lb"}), [], nodes)
    id_ = "038c7b3d-e40a-4b72-a4b5-e45c520f23e1"
    octavia = msgspec.structs.replace(CONFIG, subnet_id="", adopt_from="kubernetes")
    found = planned(
        make_service(annotations={OPENSTACK + "load-balancer-id": id_}), [], nodes, octavia
    )
    assert isinstance(found.settings, OctaviaSettings)
    assert found.settings.shared_or_adopted is not None
    assert found.settings.shared_or_adopted.id == id_
    assert found.settings.shared_or_adopted.names[0].startswith("kube_service_kubernetes_default_")


def test_the_plan_has_the_addresses_of_the_existing_load_balancer(
    make_service: Callable[..., Service],
    make_slice: Callable[..., EndpointSlice],
    nodes: dict[str, Node],
) -> None:
    """Until the load balancer has an address that clients can use, the plan has the addresses in
    the status of the Service."""
    shown = ServiceStatus(LoadBalancerStatus((LoadBalancerIngress("203.0.113.9"),)))
    service = msgspec.structs.replace(make_service(), status=shown)
    inner = make_service(annotations={FAIRLEAD + "internal": "true"})
    inside = msgspec.structs.replace(inner, status=shown)
    outside = msgspec.structs.replace(CONFIG, floating_network_id="outside")
    bare = existing_of(service, "ovn")
    reached = msgspec.structs.replace(bare, floating=("203.0.113.7",))
    for asked, existing, addresses in (
        (service, None, ("203.0.113.9",)),
        (service, bare, ("203.0.113.9",)),
        (service, reached, ("203.0.113.7",)),
        (inside, reached, ("10.0.0.7",)),
        (service, msgspec.structs.replace(bare, shared=True), ("10.0.0.7",)),
        (service, msgspec.structs.replace(reached, uid="another"), ("203.0.113.9",)),
    ):
        found = planned(asked, [], nodes, outside, existing)
        assert found.addresses == addresses, existing
        assert isinstance(found.settings, OctaviaSettings)
        assert found.settings.held == ("203.0.113.9",)
        assert found.settings.existing == (
            existing if existing is not None and existing.uid == asked.metadata.uid else None
        )


def test_a_service_becomes_dirty_when_its_load_balancer_is_observed_to_have_changed() -> None:
    """An equal observation does not make the Service dirty."""
    state = State(())
    key = ServiceKey("default", "web")
    existing = ExistingLoadBalancer("uid", "ovn", ("10.0.0.7",))
    for seen, marked in ((existing, True), (existing, False), (None, True), (None, False)):
        with state.subscribers.subscription() as dirty:
            state.observe_load_balancer(key, seen)
            assert (key in dirty) is marked
