"""Texts and Services become targets, or are refused with the form that is understood."""

import pytest

from fairlead.errors import Refused
from fairlead.kube.objects import (
    LoadBalancerIngress,
    LoadBalancerStatus,
    Service,
    ServiceMeta,
    ServicePort,
    ServiceSpec,
    ServiceStatus,
)
from fairlead.reach.targets import Target, of_services, parse, unprobed


@pytest.mark.parametrize(
    ("text", "scheme", "host", "port", "path"),
    [
        ("192.0.2.1:80", "http", "192.0.2.1", 80, "/"),
        ("192.0.2.1:8443", "https", "192.0.2.1", 8443, "/"),
        ("192.0.2.1:22", "tcp", "192.0.2.1", 22, "/"),
        ("tcp://192.0.2.1:80", "tcp", "192.0.2.1", 80, "/"),
        ("[2001:db8::1]:80", "http", "2001:db8::1", 80, "/"),
        ("http://shop.example", "http", "shop.example", 80, "/"),
        ("https://shop.example/a?b=c", "https", "shop.example", 443, "/a?b=c"),
        ("http://[2001:db8::1]:8000/x", "http", "2001:db8::1", 8000, "/x"),
        ("192.0.2.1:443/healthz", "https", "192.0.2.1", 443, "/healthz"),
        ("http://192.0.2.1?a=b", "http", "192.0.2.1", 80, "/?a=b"),
        ("192.0.2.1:9000/healthz", "http", "192.0.2.1", 9000, "/healthz"),
    ],
)
def test_targets(text: str, scheme: str, host: str, port: int, path: str) -> None:
    found = parse(text)
    assert (found.scheme, found.host, found.port, found.path) == (scheme, host, port, path)
    assert found.name == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "192.0.2.1",
        ":80",
        "192.0.2.1:0",
        "192.0.2.1:65536",
        "http://192.0.2.1:0/",
        "192.0.2.1:http",
        "2001:db8::1:80",
        "[2001:db8::1]",
        "[2001:db8::1",
        "udp://192.0.2.1:53",
        "tcp://192.0.2.1:80/path",
        "http://",
        "http://user@192.0.2.1/",
        "192.0.2.1:80/a b",
        "192.0.2.1:80/\r\nHost: other",
        "192.0.2.1:80/ü",
    ],
)
def test_other_texts_are_refused_with_the_form(text: str) -> None:
    with pytest.raises(Refused) as refused:
        parse(text)
    assert "give ADDRESS:PORT" in refused.value.fix
    assert repr(text) in refused.value.message


def service(
    *ports: ServicePort, addresses: tuple[str, ...] = ("192.0.2.1",), kind: str = "LoadBalancer"
) -> Service:
    ingress = tuple(LoadBalancerIngress(ip=each) for each in addresses)
    return Service(
        ServiceMeta("web", "shop"),
        ServiceSpec(type=kind, ports=ports),  # type: ignore[arg-type]
        ServiceStatus(LoadBalancerStatus(ingress)),
    )


def test_each_tcp_port_of_each_address_of_a_service_is_a_target() -> None:
    found = of_services(
        [
            service(
                ServicePort(80),
                ServicePort(5000, app_protocol="http"),
                ServicePort(443, app_protocol="kubernetes.io/h2c"),
                ServicePort(53, protocol="UDP"),
                addresses=("192.0.2.1", "2001:db8::1"),
            )
        ]
    )
    assert found == [
        Target("shop/web 192.0.2.1:80", "http", "192.0.2.1", 80),
        Target("shop/web 192.0.2.1:5000", "http", "192.0.2.1", 5000),
        Target("shop/web 192.0.2.1:443", "tcp", "192.0.2.1", 443),
        Target("shop/web [2001:db8::1]:80", "http", "2001:db8::1", 80),
        Target("shop/web [2001:db8::1]:5000", "http", "2001:db8::1", 5000),
        Target("shop/web [2001:db8::1]:443", "tcp", "2001:db8::1", 443),
    ]


def test_what_is_not_called_is_said() -> None:
    services = [
        service(ServicePort(80), ServicePort(53, protocol="UDP")),
        service(ServicePort(80), addresses=()),
        service(ServicePort(53, protocol="UDP"), kind="ClusterIP"),
        service(ServicePort(80)),
    ]
    assert unprobed(services) == [
        "shop/web: 53/UDP is not called, only TCP is",
        "shop/web has no address",
    ]
    assert of_services([services[2]]) == []
