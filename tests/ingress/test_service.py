"""The entry points of a Service, and the findings of its objects."""

import asyncio
import queue
import socketserver
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from tests.makers import make_slice

from fairlead.cli import cli
from fairlead.cli.ingress import _address
from fairlead.errors import FairleadError, Refused
from fairlead.ingress.service import (
    ServiceObjects,
    controller_of,
    families_of,
    findings,
    not_tested,
    read,
    sends,
    speaks_tls,
    targets,
)
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.objects import (
    CONFIG_MAPS,
    ENDPOINT_SLICES,
    SERVICES,
    Endpoint,
    EndpointConditions,
    EndpointPort,
    EndpointSlice,
    FieldsManager,
    LoadBalancerIngress,
    LoadBalancerStatus,
    Node,
    NodeAddress,
    NodeStatus,
    ObjectKey,
    ObjectMeta,
    Service,
    ServiceMeta,
    ServicePort,
    ServiceSpec,
    ServiceStatus,
)
from fairlead.lab import settings
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.kubeapiserver import KubeApiServer

KEY = ObjectKey("default", "ingress-to-check")
PORTS = (
    ServicePort(80, "http", node_port=30080),
    ServicePort(443, "https", node_port=30443),
    ServicePort(443, "h3", "UDP"),
)


def service(
    *entries: LoadBalancerIngress,
    load_balancer_class: str | None = "fairlead.io/direct",
    policy: Any = "Local",
    **annotations: str,
) -> Service:
    names = {
        name.replace("__", "/").replace("_", "-"): value for name, value in annotations.items()
    }
    spec = ServiceSpec(
        "LoadBalancer",
        PORTS,
        {"app": "web"},
        load_balancer_class=load_balancer_class,
        external_traffic_policy=policy,
    )
    return Service(
        ServiceMeta("web", "shop", annotations=names),
        spec,
        ServiceStatus(LoadBalancerStatus(entries)),
    )


def objects_of(*entries: LoadBalancerIngress, **fields: Any) -> ServiceObjects:
    ports = (EndpointPort("http", 8080), EndpointPort("https", 8443))
    slices = tuple(
        EndpointSlice(
            ObjectMeta("web-1", "shop"),
            family,
            (
                Endpoint((gone,), EndpointConditions(ready=False), "node1"),
                Endpoint((there,), node_name="node2"),
            ),
            ports,
        )
        for family, gone, there in (
            ("IPv4", "10.0.1.1", "10.0.2.1"),
            ("IPv6", "2001:db8:a::1", "2001:db8:a::2"),
        )
    )
    addresses = (NodeAddress("ExternalIP", "198.51.100.2"), NodeAddress("InternalIP", "192.0.2.2"))
    return ServiceObjects(
        service(*entries, **fields),
        slices,
        {"node2": Node(ObjectMeta("node2"), status=NodeStatus(addresses))},
        None,
    )


VIP, PROXY = (
    LoadBalancerIngress("203.0.113.9", ip_mode="VIP"),
    LoadBalancerIngress("203.0.113.9", ip_mode="Proxy"),
)


def test_each_tcp_port_and_address_has_its_entry_points() -> None:
    made = targets(objects_of(VIP, LoadBalancerIngress("2001:db8:f::9")), "a.example.com", "/who")
    entry_points = [
        (
            front.address,
            front.port,
            front.tls,
            [
                (name, entry_point.address, entry_point.port, entry_point.tls)
                for name, entry_point in behind
            ],
        )
        for front, behind in ((each.front, each.behind) for each in made)
    ]
    assert entry_points == [
        (
            "203.0.113.9",
            80,
            False,
            [("pod", "10.0.2.1", 8080, False), ("node port", "192.0.2.2", 30080, False)],
        ),
        ("2001:db8:f::9", 80, False, [("pod", "2001:db8:a::2", 8080, False)]),
        (
            "203.0.113.9",
            443,
            True,
            [("pod", "10.0.2.1", 8443, True), ("node port", "192.0.2.2", 30443, True)],
        ),
        ("2001:db8:f::9", 443, True, [("pod", "2001:db8:a::2", 8443, True)]),
    ]
    assert {each.front.path for each in made} == {"/who"}
    hostname = targets(
        objects_of(LoadBalancerIngress(hostname="203.0.113.9.nip.io")), "", "/", "never"
    )
    assert {(each.front.address, each.front.tls) for each in hostname} == {
        ("203.0.113.9.nip.io", False)
    }


def with_ports(*ports: ServicePort) -> ServiceObjects:
    found = objects_of(VIP)
    spec = msgspec.structs.replace(found.service.spec, ports=ports)
    return msgspec.structs.replace(found, service=msgspec.structs.replace(found.service, spec=spec))


def test_a_port_is_known_to_speak_http_by_app_protocol_name_or_number() -> None:
    """nginx and its like publish any TCP service: 22-tcp, 25565-tcp."""
    rows = [
        (ServicePort(22, "22-tcp"), (False, False)),
        (ServicePort(8000, "http-alt"), (True, False)),
        (ServicePort(9000, "web"), (True, False)),
        (ServicePort(80, "x"), (True, False)),
        (ServicePort(8443, "x"), (True, True)),
        (ServicePort(9000, "websecure"), (True, True)),
        (ServicePort(9000, "x", app_protocol="HTTPS"), (True, True)),
        (ServicePort(443, "https", app_protocol="http"), (True, False)),
        (ServicePort(443, "x", app_protocol="tcp"), (True, True)),
        (ServicePort(9000, "x", app_protocol="kubernetes.io/h2c"), (False, False)),
    ]
    found = with_ports(*(port for port, _ in rows))
    made = targets(found, "", "/")
    assert [(each.is_web, each.front.tls) for each in made] == [expected for _, expected in rows]
    assert not_tested(found.service) == ()


def test_ports_of_another_protocol_get_no_request_and_are_named() -> None:
    found = with_ports(
        ServicePort(443, "h3", "UDP"),
        ServicePort(22, "ssh", app_protocol="ssh"),
        ServicePort(80, "http"),
    )
    assert [each.front.port for each in targets(found, "", "/")] == [80]
    [finding] = not_tested(found.service)
    assert (finding.code, finding.severity) == ("NotTested", "info")
    assert "443/UDP: " in finding.message
    assert "22/TCP: its appProtocol is 'ssh'" in finding.message
    with pytest.raises(Refused, match="no port that can be checked: 22/TCP: its appProtocol is"):
        targets(with_ports(ServicePort(22, app_protocol="ssh")), "", "/")


async def test_a_check_that_tested_nothing_says_so_by_its_exit_status(tmp_path: Path) -> None:
    """A server that speaks another protocol, behind a port of which nothing is known."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        writer.close()

    async with (
        await asyncio.start_server(greet, "127.0.0.1", 0) as sshd,
        ApiServer() as server,
        Client(Access(server.url)) as client,
    ):
        port = sshd.sockets[0].getsockname()[1]
        shown = {"loadBalancer": {"ingress": [{"ip": "127.0.0.1", "ipMode": "VIP"}]}}
        spec = {
            "type": "LoadBalancer",
            "externalTrafficPolicy": "Local",
            "ports": [{"name": "22-tcp", "port": port}],
        }
        await client.create(
            SERVICES, {"metadata": {"name": KEY.name}, "spec": spec}, namespace="default"
        )
        await client.patch(SERVICES, KEY, {"status": shown}, subresource="status")
        body = {
            "metadata": {"name": "a", "labels": {"kubernetes.io/service-name": KEY.name}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": ["192.0.2.1"], "nodeName": "node1"}],
            "ports": [{"name": "22-tcp", "port": port, "protocol": "TCP"}],
        }
        await client.create(ENDPOINT_SLICES, body, namespace="default")
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(settings.kubeconfig("here", client.access))
        options = ("--echo", "/", "--timeout", "1", "--kubeconfig", str(kubeconfig))
        of_service = await checked(KEY.name, *options)
        of_address = await checked(f"127.0.0.1:{port}")
    code, report = of_service
    assert [each["code"] for each in report["findings"]] == ["NotTested"]
    assert (code, report["tested"]) == (1, False)
    code, report = of_address
    [finding] = report["findings"]
    assert (code, finding["code"]) == (3, "Rejected"), "the user says that this port speaks HTTP"
    assert "check the port and its protocol" in finding["remedy"]


async def checked(*arguments: str) -> tuple[int | None, dict[str, Any]]:
    """Run `fairlead ingress check`. Return the exit status and the report."""
    program = str(Path(sys.executable).with_name("fairlead"))
    child = await asyncio.create_subprocess_exec(
        *(program, "ingress", "check", *arguments, "-o", "json"), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        output, _ = await child.communicate()
    return child.returncode, msgspec.json.decode(output)


@pytest.mark.parametrize(
    ("hostname", "families", "pods"),
    [
        ("203.0.113.9.nip.io", {}, ["10.0.2.1"]),
        ("2001-db8-f--9.nip.io", {}, ["2001:db8:a::2"]),
        ("web.example.com", {"web.example.com": ["IPv6"]}, ["2001:db8:a::2"]),
        ("web.example.com", {"web.example.com": ["IPv4", "IPv6"]}, ["10.0.2.1", "2001:db8:a::2"]),
        ("web.example.com", {}, ["10.0.2.1", "2001:db8:a::2"]),
    ],
)
def test_entry_points_behind_a_hostname_have_its_address_families(
    hostname: str, families: dict[str, Any], pods: list[str]
) -> None:
    """The families come from the address in the hostname, or from DNS. If neither is known, both
    families are used."""
    known = msgspec.structs.replace(
        objects_of(LoadBalancerIngress(hostname=hostname)), families=families
    )
    for target in targets(known, "", "/"):
        assert [entry_point.address for name, entry_point in target.behind if name == "pod"] == pods


@pytest.mark.parametrize(
    ("state", "ready"), [("unready", False), ("dying", False), ("draining", True), ("ready", True)]
)
def test_readiness_is_determined_for_each_address_family(state: str, ready: bool) -> None:
    """A pod counts as ready if it gets new connections. If no pod is ready, terminating pods that
    still serve get them."""
    slices = (make_slice([("10.0.1.1", "node1", state)], ports=[("http", 8080), ("https", 8443)]),)
    known = msgspec.structs.replace(
        objects_of(VIP, LoadBalancerIngress("2001:db8:f::9")), slices=slices
    )
    assert [each.ready for each in targets(known, "", "/")] == [ready, False] * 2


async def test_a_hostname_has_the_families_that_this_host_resolves() -> None:
    assert "IPv4" in await families_of("localhost")
    assert await families_of(f"{'a' * 64}.example.com") == ("IPv4", "IPv6")


def test_a_service_without_an_address_is_refused() -> None:
    with pytest.raises(Refused, match="has no address"):
        targets(objects_of(), "", "/")


@pytest.mark.parametrize(
    ("name", "annotations", "expected"),
    [
        ("fairlead.io/direct", {"fairlead_io__proxy_protocol": "v2"}, "none"),
        ("fairlead.io/proxy", {}, "none"),
        (
            "fairlead.io/proxy",
            {
                "fairlead.io__proxy_protocol": "v2",
                "loadbalancer.openstack.org__proxy_protocol": "v1",
            },
            "v2",
        ),
        ("fairlead.io/proxy", {"loadbalancer.openstack.org__proxy_protocol": "True"}, "v1"),
        ("fairlead.io/proxy", {"fairlead.io__proxy_protocol": "v3"}, None),
        (None, {"loadbalancer.openstack.org__proxy_protocol": "v2"}, "v2"),
        (None, {}, None),
        ("example.com/other", {}, None),
    ],
)
def test_the_header_that_the_load_balancer_sends(
    name: str | None, annotations: dict[str, str], expected: str | None
) -> None:
    assert sends(service(load_balancer_class=name, **annotations)) == expected


def test_a_misspelled_header_is_the_one_that_is_in_force() -> None:
    wrong = service(load_balancer_class="fairlead.io/proxy")
    annotations = {
        "fairlead.io/class": "fairlead.io/proxy",
        "fairlead.io/proxy-protocol": "v22",
        "fairlead.io/understood": '{"fairlead.io/proxy-protocol":"v2"}',
    }
    metadata = msgspec.structs.replace(
        wrong.metadata, annotations=annotations, managed_fields=(FieldsManager("fairlead-claim"),)
    )
    assert sends(msgspec.structs.replace(wrong, metadata=metadata)) == "v2"
    unclaimed = msgspec.structs.replace(metadata, managed_fields=())
    assert sends(msgspec.structs.replace(wrong, metadata=unclaimed)) is None


@pytest.mark.parametrize(
    ("mark", "annotations", "expected"),
    [
        ("fairlead.io/direct", {"loadbalancer.openstack.org__proxy_protocol": "true"}, "none"),
        ("fairlead.io/proxy", {"fairlead.io__proxy_protocol": "v2"}, "v2"),
        ("fairlead.io/octavia", {"loadbalancer.openstack.org__proxy_protocol": "v2"}, "v2"),
    ],
)
def test_the_header_of_a_service_of_the_default_class(
    mark: str, annotations: dict[str, str], expected: str
) -> None:
    """The Service has no class; the controller's claim names the class that serves it."""
    fields: dict[str, Any] = {
        "load_balancer_class": None,
        "fairlead.io__class": mark,
        **annotations,
    }
    assert sends(service(**fields)) == expected


def test_a_correct_setup_behind_the_default_class_has_no_findings() -> None:
    """Class direct sends no header, also with an old annotation, so a controller that expects no
    header is correct."""
    fields: dict[str, Any] = {
        "load_balancer_class": None,
        "fairlead.io__class": "fairlead.io/direct",
        "loadbalancer.openstack.org__proxy_protocol": "true",
    }
    right = msgspec.structs.replace(
        objects_of(VIP, **fields), config={"use-proxy-protocol": "false"}
    )
    assert not list(findings(right))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, []),
        ({"policy": "Cluster"}, ["PolicyCluster"]),
        (
            {"load_balancer_class": "fairlead.io/proxy", "fairlead.io__proxy_protocol": "v1"},
            ["HairpinWithoutHeader"],
        ),
    ],
)
def test_findings_about_the_objects_of_a_service(
    fields: dict[str, Any], expected: list[str]
) -> None:
    assert [each.code for each in findings(objects_of(VIP, **fields))] == expected


def test_ip_mode_proxy_has_no_hairpin_finding() -> None:
    fields = {"load_balancer_class": "fairlead.io/proxy", "fairlead.io__proxy_protocol": "v1"}
    assert not list(findings(objects_of(PROXY, **fields)))


def test_the_controller_is_recognized_by_its_chart_or_its_settings() -> None:
    assert controller_of(service(), {"use-proxy-protocol": "true"}) == "nginx"
    assert controller_of(service(), {"proxy-protocol": "10.0.0.0/8"}) == "haproxy"
    assert controller_of(service(), None) is None
    assert speaks_tls(8443)
    assert speaks_tls(9000, "https-alt")
    assert not speaks_tls(80, "http")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("192.0.2.1", ("192.0.2.1", 0)),
        ("192.0.2.1:443", ("192.0.2.1", 443)),
        ("[2001:DB8::1]:443", ("2001:db8::1", 443)),
        ("2001:db8::1", ("2001:db8::1", 0)),
        ("shop/web", None),
        ("web", None),
    ],
)
def test_addresses_and_names_of_services_are_distinguished(
    text: str, expected: tuple[str, int] | None
) -> None:
    assert _address(text) == expected


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("192.0.2.1", "--behind", "x"), "--behind x"),
        (("192.0.2.1", "--behind", "192.0.2.2:80"), "--behind"),
        (("web", "--behind", "192.0.2.2:80"), "--behind"),
        (("192.0.2.1:80", "--behind", "192.0.2.2:70000"), "'70000'"),
        (("192.0.2.1:99999",), "'99999'"),
        (("192.0.2.1:-1",), "'-1'"),
        (("192.0.2.1:0",), "'0'"),
        (("192.0.2.1:",), "''"),
        (("192.0.2.1:٨٠",), "'٨٠'"),
        (("192.0.2",), "192.0.2"),
        (("2001:db8::99999",), "2001:db8::99999"),
        (("web.example.com",), "web.example.com"),
        (("shop/",), "shop/"),
        (("192.0.2.1", "--client", "foo"), "--client foo"),
        (("192.0.2.1", "--tls", "always", "--host", "a..b"), "--host 'a..b'"),
        (("192.0.2.1", "--host", ".example.com"), "--host '.example.com'"),
        (("192.0.2.1", "--host", "a b"), "--host 'a b'"),
    ],
)
def test_a_wrong_argument_is_named_and_no_request_is_sent(
    arguments: tuple[str, ...], named: str
) -> None:
    result = CliRunner().invoke(cli, ["ingress", "check", *arguments])
    assert result.exit_code == 2
    assert named in result.stderr


@pytest.mark.parametrize(
    ("option", "path"),
    [
        ("--echo", "whoami"),
        ("--path", "whoami"),
        ("--echo", "/whoami"),
    ],
)
def test_a_path_begins_at_the_root(option: str, path: str) -> None:
    assert first_request(option, path)[0] == "GET /whoami HTTP/1.1"


def test_path_and_host_are_encoded_as_in_a_url() -> None:
    first, second, *_ = first_request("--path", "/wer bin\udcff?é=%20", "--host", "bücher.example")
    assert (first, second) == (
        "GET /wer%20bin%FF?%C3%A9=%20 HTTP/1.1",
        "Host: xn--bcher-kva.example",
    )


def first_request(*options: str) -> list[str]:
    """Return the lines of the first request that a check sends."""
    received: queue.Queue[bytes] = queue.Queue()

    class Listener(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            received.put(self.rfile.read1())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Listener) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        CliRunner().invoke(
            cli, ["ingress", "check", f"127.0.0.1:{server.server_address[1]}", *options]
        )
        server.shutdown()
    requests = [received.get_nowait() for _ in range(received.qsize())]
    return next(each for each in requests if each.startswith(b"GET")).decode().split("\r\n")


async def test_the_config_map_of_the_services_name_is_read(real_apiserver: KubeApiServer) -> None:
    """Without that ConfigMap there are no settings. A Service that does not exist is an error that
    names it."""
    manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": KEY.name},
        "spec": {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "ports": [{"port": 80}]},
    }
    async with Client(real_apiserver.access) as client:
        with pytest.raises(FairleadError, match="ingress-to-check"):
            await read(client, KEY)
        await client.create(SERVICES, manifest, namespace=KEY.namespace)
        try:
            assert (await read(client, KEY)).config is None
            data = {"use-proxy-protocol": "true"}
            path = CONFIG_MAPS.path(KEY.namespace)
            await client.request("POST", path, body={"metadata": {"name": "another"}, "data": data})
            try:
                assert (await read(client, KEY, "another")).config == data
            finally:
                await client.request("DELETE", CONFIG_MAPS.path(KEY.namespace, "another"))
        finally:
            await client.delete(SERVICES, KEY)
