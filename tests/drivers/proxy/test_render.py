"""HAProxy accepts the configuration of any Services, and a Service changes only its own
sections."""

import subprocess
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.drivers.proxy.site import VIP, VIP6, WEB, balancer

from fairlead.drivers.proxy.process import SEARCH
from fairlead.drivers.proxy.render import (
    MAX_INLINE_RANGES,
    RANGES_PER_LINE,
    Paths,
    acl_lines,
    description_of,
    render,
    section_name,
    sections_of,
    server_id,
)
from fairlead.drivers.proxy.shares import Shares
from fairlead.drivers.proxy.spec import ProxyKey, specs_of
from fairlead.kube.objects import (
    Endpoint,
    EndpointPort,
    EndpointSlice,
    FieldsManager,
    Node,
    NodeAddress,
    NodeStatus,
    ObjectMeta,
    Service,
    ServiceMeta,
    ServicePort,
    ServiceSpec,
)
from fairlead.model import LoadBalancer, MemberChecks, ProxySettings, ServiceKey
from fairlead.plan.annotations import PROXY_ANNOTATIONS
from fairlead.plan.balancer import plan_load_balancer
from fairlead.plan.classes import PROXY
from fairlead.plan.proxying import ANNOTATIONS
from fairlead.plan.service import CLAIM_MANAGER, CLASS_ANNOTATION

ADDRESSES = ("203.0.113.1", "2001:db8:f::1")
NODES = {
    name: Node(
        ObjectMeta(name=name),
        status=NodeStatus(
            (
                NodeAddress("InternalIP", f"192.0.2.{20 + at}"),
                NodeAddress("InternalIP", f"2001:db8:1::{20 + at:x}"),
            )
        ),
    )
    for at, name in enumerate(("node1", "node-2.example.com", "n" * 63), start=1)
}

SENSIBLE = [
    "true",
    "v1",
    "v2",
    "false",
    "0",
    "1",
    "10",
    "50000",
    "5s",
    "1h",
    "-1",
    "LEAST_CONNECTIONS",
    "source-ip",
]
WILD = [
    "5s\nbind :99",
    "1 # x",
    '"',
    "\\",
    "$HOME",
    "2073600001",
    "9" * 40,
    "1.5",
    "\x00",
    "{}",
    "٣",
    "²",
]
OFFERED = {
    "proxy-protocol": ["true", "v1", "v2", "false"],
    "timeout-client-data": ["0", "50s"],
    "timeout-member-data": ["0", "3h"],
    "timeout-member-connect": ["0", "1.5s"],
    "timeout-tcp-inspect": ["0", "5s"],
    "connection-limit": ["-1", "1000000"],
    "lb-method": ["round-robin", "LEAST_CONNECTIONS", "source-ip"],
    "enable-health-monitor": ["true", "false"],
    "health-monitor-delay": ["1", "3600"],
    "health-monitor-timeout": ["1", "3600"],
    "health-monitor-max-retries": ["1", "10"],
    "health-monitor-max-retries-down": ["1", "10"],
    "x-forwarded-for": ["true", "false"],
}
"""Every annotation, with valid values."""
PREFIXES = ("fairlead.io/", "loadbalancer.openstack.org/")
SHARES = Shares(262_144, 0.5)
VALUES = st.sampled_from(SENSIBLE) | st.sampled_from(WILD) | st.text(max_size=20)


def accepted(text: str, folder: Path) -> str:
    """Return HAProxy's error messages about a configuration."""
    path = folder / "haproxy.cfg"
    path.write_text(text)
    run = subprocess.run(
        ["haproxy", "-c", "-q", "-f", str(path)],
        capture_output=True,
        text=True,
        env={"PATH": SEARCH},
        check=False,
    )
    return "" if run.returncode == 0 else run.stderr


def service_of(
    number: int, annotations: dict[str, str], ranges: tuple[str, ...], affinity: bool, policy: bool
) -> Service:
    """Return a claimed Service: before that, it is refused for a value that is not understood."""
    meta = ServiceMeta(
        name=f"web-{number}",
        namespace="shop",
        uid=f"uid-{number}",
        annotations={**annotations, CLASS_ANNOTATION: PROXY.name},
        managed_fields=(FieldsManager(CLAIM_MANAGER),),
    )
    ports = (ServicePort(80, "web", node_port=30080), ServicePort(443, "tls", node_port=30443))
    spec = ServiceSpec(
        type="LoadBalancer",
        external_traffic_policy="Local" if policy else "Cluster",
        health_check_node_port=32000 if policy else 0,
        ports=ports,
        load_balancer_source_ranges=ranges or None,
        session_affinity="ClientIP" if affinity else "None",
    )
    return Service(meta, spec)


SLICES = [
    EndpointSlice(
        ObjectMeta(name=f"s-{family}"),
        family,
        tuple(Endpoint((address,), node_name=name) for name in NODES),
        tuple(EndpointPort(name, 8080) for name in ("web", "tls")),
    )
    for family, address in (("IPv4", "10.244.1.2"), ("IPv6", "2001:db8:244::2"))
]


def planned(number: int, service: Service) -> LoadBalancer:
    addresses = (f"203.0.113.{number + 1}", f"2001:db8:f::{number + 1:x}")
    return plan_load_balancer(service, SLICES, NODES, addresses, PROXY)


RANGES = [
    "10.0.0.0/8",
    "2001:db8::/32",
    "0.0.0.0/0",
    "192.0.2.7/32",
    " 192.0.2.0/24 ",
    "192.0.2.1/24",
    "2001:DB8::/33",
    "::/0",
]
SERVICES = st.tuples(
    st.dictionaries(st.sampled_from(ANNOTATIONS), VALUES, max_size=8),
    st.lists(st.sampled_from(RANGES), max_size=3).map(tuple),
    st.booleans(),
    st.booleans(),
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(SERVICES, min_size=1, max_size=12), st.data())
def test_haproxy_accepts_any_service_which_changes_only_its_own_sections(
    folder: Path,
    services: list[tuple[dict[str, str], tuple[str, ...], bool, bool]],
    data: st.DataObject,
) -> None:
    folder.mkdir(exist_ok=True)
    paths = Paths(str(folder))
    made = {at: planned(at, service_of(at, *one)) for at, one in enumerate(services)}
    specs = specs_of({each.service: each for each in made.values()})
    for service, one in specs.items():
        Path(paths.ranges(service)).write_text("".join(f"{cidr}\n" for cidr in one.source_ranges))
    text = render(specs, paths, SHARES)
    assert accepted(text, folder) == ""

    changed = data.draw(st.sampled_from(sorted(made)))
    again = planned(changed, service_of(changed, *data.draw(SERVICES)))
    other = render(specs | specs_of({again.service: again}), paths, SHARES)
    assert parts(text, but=again.service) == parts(other, but=again.service)


def parts(text: str, *, but: ServiceKey) -> list[str]:
    """Return the sections of all Services except one. The `global` section is left out, because it
    contains the digest of the text."""
    sections = text.split("\nlisten ")[1:]
    return [each for each in sections if not each.startswith(f"{but.namespace}.{but.name}.")]


def test_the_services_of_a_configuration_are_read_from_its_text(folder: Path) -> None:
    settings = ProxySettings("v2", False, "source", 1, 2, 3, 4, 5, MemberChecks())
    specs = specs_of({WEB: balancer({"node1": 1}, addresses=(VIP, VIP6), settings=settings)})
    text = render(specs, Paths(str(folder)))
    assert [(each.name, each.uid, each.listener) for each in sections_of(text)] == [
        ("web", "uid-web", each.listener) for each in specs[WEB].listeners
    ]
    assert description_of(text) != description_of(render({}, Paths(str(folder))))
    assert sections_of("    # fairlead {}") == []


@pytest.mark.parametrize(
    ("client_ms", "member_ms", "enabled"),
    [
        (3_600_000, 3_600_000, []),
        (0, 1, ["clitcpka"]),
        (1, 7_200_001, ["srvtcpka"]),
        (0, 0, ["clitcpka", "srvtcpka"]),
    ],
)
def test_tcp_keepalive_is_enabled_on_sides_with_a_long_or_no_timeout(
    client_ms: int, member_ms: int, enabled: list[str]
) -> None:
    settings = ProxySettings(client_ms=client_ms, member_ms=member_ms)
    text = render(specs_of({WEB: balancer({"node1": 1}, settings=settings)}), Paths("/run/h"))
    assert [line.split()[1] for line in text.splitlines() if "tcpka" in line] == enabled


def test_names_of_sections_and_numbers_of_servers() -> None:
    assert section_name(WEB, ProxyKey(VIP6, 80)) == "default.web.80.2001:db8:f::7"
    number = server_id("node1")
    assert server_id("node1", {number}) == number + 1
    assert len({server_id(f"node{at}") for at in range(1000)}) == 1000


@pytest.mark.parametrize(
    ("ranges", "lines"),
    [
        (1, 1),
        (RANGES_PER_LINE, 1),
        (RANGES_PER_LINE + 1, 2),
        (MAX_INLINE_RANGES, 5),
        (MAX_INLINE_RANGES + 1, 0),
    ],
)
def test_source_ranges_fill_lines_and_then_a_file(folder: Path, ranges: int, lines: int) -> None:
    longest = tuple(f"2001:db8:1111:2222:3333:4444:5555:{6000 + at}/128" for at in range(ranges))
    specs = specs_of({WEB: balancer({"node1": 1}, ranges=longest)})
    folder.mkdir()
    paths = Paths(str(folder))
    listed = Path(paths.ranges(WEB))
    if not lines:
        listed.write_text("\n".join(longest))
    assert accepted(text := render(specs, paths), folder) == ""
    assert len(acl_lines(text).get(section_name(WEB, ProxyKey(VIP, 80)), ())) == lines
    assert (str(listed) in text) != bool(lines)


def test_no_list_of_ranges_makes_haproxy_search_all_previous_lists(
    folder: Path,
) -> None:
    """HAProxy compares the file name or explicit number of each list with those of all previous
    lists."""
    ranges = tuple(f"10.0.{at}.0/24" for at in range(50))
    made = [
        balancer(
            {"node1": 1},
            key=ServiceKey("shop", f"web-{at}"),
            addresses=(f"198.18.{at >> 8}.{at & 255}",),
            ranges=ranges,
        )
        for at in range(2000)
    ]
    text = render(specs_of({each.service: each for each in made}), Paths(str(folder)))
    listed = [line.split() for line in text.splitlines() if line.startswith("    acl ")]
    assert sum(len(words) - len(("acl", "within", "src")) for words in listed) == 2000 * 50
    assert not [words for words in listed if words[3].startswith("-")]
    folder.mkdir()
    assert accepted(text, folder) == ""


@pytest.mark.long
def test_haproxy_accepts_five_thousand_services_with_every_setting(folder: Path) -> None:
    draw = Random(1)

    def asking(number: int) -> LoadBalancer:
        wishes = draw.sample(sorted(OFFERED), draw.randrange(len(OFFERED) + 1))
        annotations = {
            f"{draw.choice(PREFIXES)}{wish}": draw.choice(OFFERED[wish]) for wish in wishes
        }
        within = tuple(RANGES[:2]) if draw.random() < 0.75 else ()
        service = service_of(
            number, annotations, within, affinity=draw.random() < 0.2, policy=draw.random() < 0.5
        )
        service = msgspec.structs.replace(
            service, spec=msgspec.structs.replace(service.spec, ports=service.spec.ports[:1])
        )
        addresses = (f"198.18.{number >> 8}.{number & 255}", f"2001:db8:f::{number:x}")
        return plan_load_balancer(service, SLICES, NODES, addresses, PROXY)

    made = [asking(number) for number in range(5000)]
    assert not [note.message for each in made for note in each.notes if "allowed:" in note.message]
    assert OFFERED.keys() == set(PROXY_ANNOTATIONS)
    specs = specs_of({each.service: each for each in made})
    folder.mkdir()
    paths = Paths(str(folder))
    for service, one in specs.items():
        if one.source_ranges:
            Path(paths.ranges(service)).write_text("\n".join(one.source_ranges))
    text = render(specs, paths, SHARES)
    assert text.count("\nlisten ") == 10_000
    assert accepted(text, folder) == ""
