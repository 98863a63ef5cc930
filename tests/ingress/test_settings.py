"""The output of `fairlead ingress`: matching settings, and errors for options that cannot work."""

import itertools
from typing import Any, get_args

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from fairlead.cli import cli
from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.ingress.manifests import arguments, objects, values
from fairlead.ingress.settings import (
    CONTROLLERS,
    Class,
    Controller,
    Header,
    Options,
    Workload,
    include_every_address,
    settings,
)
from fairlead.kube.objects import ObjectKey, Service
from fairlead.model import LoadBalancer, OctaviaSettings
from fairlead.plan.annotations import NOT_UNDERSTOOD, WITHOUT_EFFECT
from fairlead.plan.cloud import plan_cloud
from fairlead.plan.octavia import CLIENT_HIDDEN
from fairlead.sections import OctaviaConfig
from fairlead.state import State

GATEWAYS = ("192.0.2.8/29", "2001:db8:1::/64")


def make_options(controller: Controller, load_balancer_class: Class, **fields: Any) -> Options:
    without = load_balancer_class == "direct" or fields.get("header") == "none"
    return Options(controller, load_balancer_class, trusted=() if without else GATEWAYS, **fields)


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_class_direct_needs_no_setting(controller: Controller) -> None:
    options = make_options(controller, "direct")
    made = settings(options)
    (service,) = objects(options, made)
    assert "annotations" not in service["metadata"]
    assert service["spec"]["loadBalancerClass"] == "fairlead.io/direct"
    assert service["spec"]["externalTrafficPolicy"] == "Local"
    assert arguments(options, made) == []
    text = yaml.safe_dump(values(options, made)).lower()
    assert "proxyprotocol" not in text
    assert "config" not in text


@pytest.mark.parametrize(
    ("controller", "data"),
    [
        (
            "nginx",
            {"use-proxy-protocol": "true", "proxy-real-ip-cidr": "192.0.2.8/29,2001:db8:1::/64"},
        ),
        ("haproxy", {"proxy-protocol": "192.0.2.8/29, 2001:db8:1::/64"}),
    ],
)
def test_the_service_and_the_config_map_match(controller: Controller, data: dict[str, str]) -> None:
    """The Service requests a header, and the ConfigMap expects it and names its sources. The values
    of the chart are the same."""
    options = make_options(controller, "proxy", header="v1")
    made = settings(options)
    service, config_map = objects(options, made)
    assert service["metadata"]["annotations"] == {"fairlead.io/proxy-protocol": "v1"}
    assert service["spec"]["loadBalancerClass"] == "fairlead.io/proxy"
    assert config_map["data"] == data
    assert config_map["metadata"]["name"] == service["metadata"]["name"]
    chart = values(options, made)["controller"]
    assert chart["config"] == data
    assert chart["service"]["annotations"] == service["metadata"]["annotations"]
    assert chart["service"]["loadBalancerClass"] == "fairlead.io/proxy"


def test_traefik_has_arguments_and_no_config_map() -> None:
    options = make_options("traefik", "proxy")
    made = settings(options)
    (service,) = objects(options, made)
    assert service["metadata"]["annotations"] == {"fairlead.io/proxy-protocol": "v2"}
    assert arguments(options, made) == [
        "--entryPoints.web.proxyProtocol.trustedIPs=192.0.2.8/29,2001:db8:1::/64",
        "--entryPoints.websecure.proxyProtocol.trustedIPs=192.0.2.8/29,2001:db8:1::/64",
    ]
    chart = values(options, made)
    assert {name: port["proxyProtocol"]["trustedIPs"] for name, port in chart["ports"].items()} == {
        "web": list(GATEWAYS),
        "websecure": list(GATEWAYS),
    }
    assert chart["service"]["spec"]["externalTrafficPolicy"] == "Local"


@pytest.mark.parametrize(
    ("load_balancer_class", "header", "rule"),
    [
        ("direct", None, "preferredDuringSchedulingIgnoredDuringExecution"),
        ("proxy", None, "preferredDuringSchedulingIgnoredDuringExecution"),
        ("octavia", "v1", "preferredDuringSchedulingIgnoredDuringExecution"),
        ("octavia", "none", "requiredDuringSchedulingIgnoredDuringExecution"),
        ("occm", "v1", "requiredDuringSchedulingIgnoredDuringExecution"),
    ],
)
def test_pods_must_be_on_different_nodes_if_nodes_get_equal_shares(
    load_balancer_class: Class, header: Header, rule: str
) -> None:
    for controller in CONTROLLERS:
        options = make_options(controller, load_balancer_class, header=header)
        made = settings(options)
        assert list(made.affinity["podAntiAffinity"]) == [rule]
        assert any("by their ready pods" in remark for remark in made.remarks) == rule.startswith(
            "preferred"
        )
        everywhere = values(
            make_options(controller, load_balancer_class, workload="daemonset"), made
        )
        assert "DaemonSet" in yaml.safe_dump(everywhere)


def test_class_octavia_has_the_provider_that_can_send_the_header() -> None:
    with_header = settings(make_options("nginx", "octavia", addresses=("203.0.113.9",)))
    assert with_header.service_spec["loadBalancerClass"] == "fairlead.io/octavia"
    assert with_header.annotations == {
        "fairlead.io/proxy-protocol": "v2",
        "fairlead.io/octavia-provider": "amphora",
        "fairlead.io/addresses": "203.0.113.9",
    }
    assert with_header.config["proxy-real-ip-cidr"] == ",".join(GATEWAYS)
    without = settings(make_options("nginx", "octavia", header="none"))
    assert without.service_spec["loadBalancerClass"] == "fairlead.io/octavia"
    assert without.annotations == {"fairlead.io/octavia-provider": "ovn"}
    assert without.config == {}


@pytest.mark.parametrize("configured", ["auto", "amphora", "ovn"])
@pytest.mark.parametrize(
    ("option", "provider", "header"),
    [("", "amphora", "v2"), ("v1", "amphora", "v1"), ("none", "ovn", "")],
)
def test_class_octavia_accepts_the_printed_service(
    option: str, provider: str, header: str, configured: Any
) -> None:
    """The provider that the remarks name serves the Service, whatever provider is configured, and
    every annotation has an effect."""
    argv = ["ingress", "nginx", "--class", "octavia", "--ip", "203.0.113.9"]
    argv += ["--proxy-protocol", option] if option else []
    argv += [] if option == "none" else ["--trusted", "10.0.0.0/24"]
    output = CliRunner().invoke(cli, argv, catch_exceptions=False).output
    assert f"Octavia's provider is {provider}" in output
    printed = next(yaml.safe_load_all(output))
    for number, port in enumerate(printed["spec"]["ports"]):
        port["nodePort"] = 30080 + number  # set by the API server
    service = msgspec.convert(printed, Service)
    key = ObjectKey(*service.key)
    state = State(())
    state.update_services({key: service})
    octavia = OctaviaConfig(subnet_id="subnet", provider=configured)
    planned = plan_cloud(state, Config(octavia=octavia), [service.key])[service.key]
    assert isinstance(planned, LoadBalancer), planned
    settings = planned.settings
    assert isinstance(settings, OctaviaSettings)
    assert (settings.provider, settings.header, settings.place.address) == (
        provider,
        header,
        "203.0.113.9",
    )
    assert {note.code for note in planned.notes}.isdisjoint(
        {NOT_UNDERSTOOD, WITHOUT_EFFECT, CLIENT_HIDDEN}
    ), planned.notes


def test_a_service_of_openstacks_cloud_controller_has_no_class() -> None:
    """OpenStack's cloud controller ignores Services with a class. The Service has a health monitor,
    and for provider ovn no header."""
    options = make_options("nginx", "occm", header="v2", addresses=("203.0.113.9",))
    service, _ = objects(options, settings(options))
    assert service["metadata"]["annotations"] == {
        "loadbalancer.openstack.org/proxy-protocol": "v2",
        "loadbalancer.openstack.org/enable-health-monitor": "true",
    }
    assert "loadBalancerClass" not in service["spec"]
    assert service["spec"]["loadBalancerIP"] == "203.0.113.9"
    (without,) = objects(options, settings(make_options("nginx", "occm", header="none")))
    assert set(without["metadata"]["annotations"]) == {
        "loadbalancer.openstack.org/enable-health-monitor"
    }


def test_addresses_set_the_ip_families() -> None:
    both = settings(make_options("nginx", "direct", addresses=("2001:DB8:f::9", "203.0.113.9")))
    assert both.annotations == {"fairlead.io/addresses": "2001:db8:f::9,203.0.113.9"}
    assert both.service_spec["ipFamilies"] == ["IPv6", "IPv4"]
    assert settings(make_options("nginx", "direct", addresses=("2001:db8:f::9",))).service_spec[
        "ipFamilies"
    ] == ["IPv6"]


@pytest.mark.parametrize(
    ("release", "names"),
    [
        ("edge", ["edge-ingress-nginx-controller", "edge-kubernetes-ingress", "edge-traefik"]),
        ("", ["ingress-nginx-controller", "haproxy-kubernetes-ingress", "traefik"]),
    ],
)
def test_objects_have_the_names_of_the_chart(release: str, names: list[str]) -> None:
    assert [
        settings(make_options(controller, "direct", release=release)).name
        for controller in CONTROLLERS
    ] == names


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            Options("nginx", "direct", header="v2", trusted=GATEWAYS),
            "cannot send a PROXY header",
        ),
        (Options("nginx", "proxy", header="none"), "hides the client's address"),
        (Options("nginx", "proxy"), "any client could forge its address"),
        (Options("nginx", "direct", trusted=GATEWAYS), "and none is sent"),
        (Options("nginx", "proxy", trusted=("192.0.2.1/24",)), "has host bits set"),
        (Options("nginx", "proxy", trusted=("gateways",)), "'gateways' is not a CIDR"),
        (Options("nginx", "proxy", trusted=("::ffff:192.0.2.0/120",)), "IPv4-mapped IPv6 address"),
        (
            Options("nginx", "direct", addresses=("192.0.2.1", "192.0.2.2")),
            "two addresses of one family",
        ),
        (Options("nginx", "direct", addresses=("web",)), "--ip: 'web'"),
        (
            Options("nginx", "octavia", header="none", addresses=("192.0.2.1", "2001:db8::1")),
            "only one address",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(options: Options, words: str) -> None:
    with pytest.raises(Refused, match=words) as refusal:
        settings(options)
    assert refusal.value.fix


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        (["0.0.0.0/0"], True),
        ([" ::/0"], True),
        (["10.0.0.0/8", "x", ""], False),
        (["0.0.0.0/1", "128.0.0.0/1"], True),
        (["0.0.0.0/1", "192.0.0.0/2", "10.0.0.0/8", "128.0.0.0/2"], True),
        (["0.0.0.0/1", "8000::/1"], False),
        (["10.0.0.0/8", "8000::/1", "::/1"], True),
        ([], False),
    ],
)
def test_ranges_that_include_every_address(ranges: list[str], expected: bool) -> None:
    assert include_every_address(ranges) == expected


@pytest.mark.parametrize(
    "trusted", [("0.0.0.0/0",), ("0.0.0.0/1", "128.0.0.0/1"), ("8000::/1", "::/1")]
)
def test_a_trusted_range_of_every_address_has_a_security_remark(trusted: tuple[str, ...]) -> None:
    made = settings(Options("haproxy", "proxy", trusted=trusted))
    assert any(remark.startswith("SECURITY") for remark in made.remarks)


@pytest.mark.parametrize("output", ["yaml", "helm"])
def test_output_is_yaml(output: str) -> None:
    every: Any = itertools.product(CONTROLLERS, get_args(Class), get_args(Workload))
    for controller, name, workload in every:
        trusted = [] if name == "direct" else ["--trusted", "192.0.2.0/24"]
        argv = [
            "ingress",
            controller,
            "--class",
            name,
            "--workload",
            workload,
            "-o",
            output,
            *trusted,
        ]
        done = CliRunner().invoke(cli, argv, catch_exceptions=False)
        assert done.exit_code == 0
        documents = list(yaml.safe_load_all(done.output))
        assert all(documents)
        assert done.output.startswith("# ")
        # Anchors are valid YAML, but hard to read.
        assert "&id" not in done.output
