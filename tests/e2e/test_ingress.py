"""Ingress controllers behind a load balancer: applications see the client's address, and `fairlead
ingress check` finds wrong configurations."""

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.drivers.inside import run_inside
from tests.e2e.ingress import CONTROLLERS, EITHER_PORT, GATEWAY, HOSTS, Entry, Ingresses
from tests.e2e.kubectl import Kubectl, service
from tests.e2e.load import OPEN_CONNECTIONS, Load, addresses_of, until
from tests.e2e.proxied import PATIENCE_S, PROXY, await_described
from tests.programs import needed

from fairlead.errors import Refused
from fairlead.ingress.check import Plan, Report, check
from fairlead.ingress.entrypoint import EntryPoint
from fairlead.ingress.service import Target
from fairlead.ingress.settings import Class, Controller, Header
from fairlead.kube.objects import SERVICES, ObjectKey
from fairlead.lab.site import Site
from fairlead.plan.addresses import address_in
from fairlead.probe.steady import Broken, Period

pytestmark = [pytest.mark.long, pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

CLIENT = "client1"
DEADLINE_S = 60

CASES: list[tuple[str, Class, Header, set[str]]] = [
    ("off", "direct", "none", set()),
    ("narrow", "direct", "none", {"HeaderMissing"}),
    ("wide", "direct", "none", {"HeaderMissing", "ClientMayForge"}),
    ("off", "proxy", "none", {"AddressLost"}),
    ("off", "proxy", "v1", {"HeaderNotExpected"}),
    ("off", "proxy", "v2", {"HeaderNotExpected"}),
    ("narrow", "proxy", "v1", set()),
    ("narrow", "proxy", "v2", set()),
    # The load balancer writes no header here, so a header that the client sends comes first. It
    # arrives from the load balancer, which is trusted.
    ("narrow", "proxy", "none", {"HeaderMissing", "ClientMayForge"}),
    ("wide", "proxy", "v2", {"ClientMayForge"}),
]
"""The configuration of the controller, the class, the header, and the required findings."""
EXCEPTIONS: dict[tuple[Controller, str, Class], set[str]] = {("haproxy", "narrow", "direct"): set()}
"""HAProxy requires a header from trusted sources only: behind class direct, no client is trusted.
"""


def program(name: str) -> Path:
    found = shutil.which(name)
    if not found:
        raise Refused(f"{name} is not installed", fix="make tools")
    return Path(found)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ingresses(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ingresses]:
    for name in ("nginx", "haproxy", "openssl"):
        needed(partial(program, name))
    async with Site.create(f"ingress{os.getpid()}", nodes=2, gateways=1, clients=1) as site:
        made = Ingresses(site, tmp_path_factory.mktemp("ingress"))
        await made.start()
        yield made


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize(
    ("trust", "by", "sends"),
    [("off", "direct", "none"), ("narrow", "proxy", "v1"), ("narrow", "proxy", "v2")],
)
async def test_applications_see_the_client_address(
    ingresses: Ingresses, controller: Controller, trust: str, by: Class, sends: Header
) -> None:
    """Two applications, by host name with TLS, over both families. Behind class direct the
    controllers need no setting."""
    own = ingresses.site.topology.host(CLIENT).addresses
    for application, name in zip(("app-a", "app-b"), HOSTS, strict=True):
        for address in ingresses.services[Entry(controller, trust, by, sends)]:
            answer = await call_over_tls(ingresses.site, address, name)
            assert (answer["pod"], answer["forwarded_for"]) == (application, own[":" in address])


@pytest.mark.parametrize("controller", CONTROLLERS)
async def test_the_check_finds_every_wrong_configuration(
    ingresses: Ingresses, controller: Controller
) -> None:
    """The cases are run with and without TLS, over both families. A correct configuration gets no
    finding."""
    cases = list(itertools.product(CASES, (False, True), range(2)))

    async def one(set_up: tuple[str, Class, Header, set[str]], tls: bool, family: int) -> None:
        trust, by, sends, expected = set_up
        expected = EXCEPTIONS.get((controller, trust, by), expected)
        plan_of_case = plan(ingresses, Entry(controller, trust, by, sends), tls, family)
        report: Report

        async def as_expected() -> bool:
            nonlocal report
            report = await check(plan_of_case)
            return {
                each.code for each in report.findings if each.severity in ("security", "error")
            } == expected

        try:
            # With a wrong configuration no request ever succeeds, so there is no readiness to wait
            # for.
            await until(as_expected, "the findings")
        except AssertionError:
            pytest.fail(
                f"{trust} {by} {sends} {tls=} {family=}: expected {expected}, found {report}"
            )
        assert report.has_problems == bool(expected)

    async def scenario() -> None:
        await asyncio.gather(*itertools.starmap(one, cases))

    run_inside(ingresses.site.namespace(CLIENT), scenario, deadline_s=2 * DEADLINE_S)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (Entry("nginx", "off", "direct"), set()),
        (Entry("nginx", "wide", "direct"), {"HeaderMissing", "ClientMayForge"}),
        (Entry("haproxy", "narrow", "proxy", "v2"), set()),
        (Entry("nginx", "off", "proxy", "v1"), {"HeaderNotExpected"}),
    ],
    ids=lambda each: each.name if isinstance(each, Entry) else "",
)
async def test_the_check_accepts_the_name_of_a_service(
    ingresses: Ingresses, entry: Entry, expected: set[str]
) -> None:
    """The command finds and tests the load-balancer address, a pod and a node port, as a user
    would."""
    site = ingresses.site
    report = await checked(site, entry.name, "--echo", "/")
    found = {
        each["code"] for each in report["findings"] if each["severity"] in ("security", "error")
    }
    assert found == expected, report
    assert {row["place"].rpartition(" ")[0] for row in report["calls"]} == {
        "load balancer",
        "pod",
        "node port",
    }
    assert report["sends"] == entry.sends
    codes = {each["code"] for each in report["findings"]}
    if not expected:
        assert {"AddressSeen", "ForgeryWithoutEffect"} <= codes
    if "ClientMayForge" in codes:
        assert any(
            "198.18.254.1, 198.18.254.2 is trusted" in each["message"]
            for each in report["findings"]
        )


async def test_the_check_reports_no_header_problem_for_a_service_without_pods(
    ingresses: Ingresses,
) -> None:
    """HAProxy closes connections for which it has no server, like a pod that does not expect a
    header."""
    site = ingresses.site
    await site.apply(
        [
            to_nginx(
                "deserted", ingresses.port("narrow", tls=False), "v2", selector={"app": "nobody"}
            )
        ]
    )
    await addresses_of(site, "deserted")

    async def is_reported() -> bool:
        # No port is open until HAProxy has loaded the Service.
        report = await checked(site, "deserted")
        assert {each["code"] for each in report["findings"]} == {"NoPod"}
        return all(row["answer"]["outcome"] == "rejected" for row in report["calls"])

    await until(is_reported, "the findings about the Service without pods")


async def test_the_check_finds_forgeable_headers_behind_a_hostname_with_ipv6(
    ingresses: Ingresses, tmp_path: Path
) -> None:
    """A pod trusts headers from the balancer, which writes none: it would accept forged ones from
    any client."""
    site = ingresses.site
    named = to_nginx("named", ingresses.port("narrow", tls=False), ipFamilies=["IPv6"])
    named["metadata"]["annotations"]["fairlead.io/hostname-suffix"] = "nip.io"
    await site.apply([named])
    async with site.client() as client:

        async def hostname() -> str:
            service = await client.get(SERVICES, ObjectKey("default", "named"))
            return next((entry.hostname for entry in service.status.load_balancer.ingress), "")

        await until(hostname, "the hostname")
        name = await hostname()
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{address_in(name)} {name}\n")
    # The lab cannot reach the DNS of nip.io. The hosts file, which only this command sees, contains
    # its answer.
    there = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount --bind "$0" /etc/hosts && exec "$@"',
        str(hosts),
    ]

    async def is_found() -> bool:
        report = await checked(site, "named", "--echo", "/", through=there)
        assert {row["place"].rpartition(" ")[0] for row in report["calls"]} == {
            "load balancer",
            "pod",
            "node port",
        }
        messages = {
            each["code"]: each["message"]
            for each in report["findings"]
            if each["severity"] in ("security", "error")
        }
        return messages.keys() == {
            "HeaderMissing",
            "ClientMayForge",
        } and "2001:2:0:fe::2 is trusted" in "".join(messages.values())

    await until(is_found, "the finding about forged headers")


async def test_moving_clients_to_a_second_service_loses_no_connection(
    ingresses: Ingresses,
) -> None:
    """nginx accepts connections with a header on one port, and without a header on another
    (docs/proxy.md). Moving clients from one Service to another loses no connection. Switching one
    Service loses new connections, and an Event tells its owner what to do instead."""
    site, kubectl = (
        ingresses.site,
        Kubectl(ingresses.site.directory.kubeconfig, ingresses.site.name),
    )
    own = site.topology.host(CLIENT).addresses[0]
    without, expecting = (ingresses.port(trust, tls=False) for trust in ("off", "narrow"))
    await site.apply([to_nginx("first", without)])
    (first,) = await addresses_of(site, "first")
    async with AsyncExitStack() as old:
        old_clients = await old.enter_async_context(Load(site, first, timeout_s=PATIENCE_S))
        await site.apply([to_nginx("second", expecting, "v1")])
        (second,) = await addresses_of(site, "second")
        async with Load(site, second, timeout_s=PATIENCE_S) as clients:
            assert (await plain(site, second))["forwarded_for"] == own
            await site.apply([to_nginx("second", expecting, "v2")])
            await await_described(
                kubectl,
                "second",
                "ProxyHeaderSwitched",
                "pods must already accept both versions",
            )
            for load in (old_clients, clients):
                assert losses(await load.counts_during(asyncio.sleep(0))) == (
                    {},
                    [],
                    OPEN_CONNECTIONS,
                )

            # This is the effect that docs/proxy.md warns of: open connections continue, and new
            # ones fail until the change is reverted.
            await site.apply([to_nginx("first", without, "v2")])
            await await_described(
                kubectl,
                "first",
                "ProxyHeaderSwitched",
                "connections with and without a header",
                "move clients to a second Service",
            )
            failures, broken, still_open = losses(await old_clients.counts_during(asyncio.sleep(0)))
            assert (bool(failures), broken, still_open) == (True, [], OPEN_CONNECTIONS)
            await site.apply([to_nginx("first", without)])
            await until(partial(plain, site, first), "an answer of the first Service")
            assert losses(await old_clients.counts_during(asyncio.sleep(0))) == (
                {},
                [],
                OPEN_CONNECTIONS,
            )

            await old.aclose()
            async with site.client() as client:
                await client.delete(SERVICES, ObjectKey("default", "first"))
            await until(partial(is_gone, site, first), "the end of the first Service")
            assert losses(await clients.take()) == ({}, [], OPEN_CONNECTIONS)


async def test_switching_the_header_of_a_server_that_accepts_both_forms_loses_no_connection(
    ingresses: Ingresses,
) -> None:
    """HAProxy accepts connections with and without a header from the gateways (docs/proxy.md). The
    header is switched on, to the other version, and off, under load. New connections are logged
    with the client's address while the header is on; open connections keep the address with which
    they began."""
    site, kubectl = (
        ingresses.site,
        Kubectl(ingresses.site.directory.kubeconfig, ingresses.site.name),
    )
    client, gateway = (site.topology.host(host).addresses[0] for host in (CLIENT, GATEWAY))
    await site.apply([to_either("")])
    (address,) = await addresses_of(site, "either")
    await until(partial(plain, site, address), "an answer of the Service")

    async def switch(header: str, described_as: str) -> None:
        await site.apply([to_either(header)])
        await await_described(kubectl, "either", f"new connections begin with {described_as}, ")

    async with AsyncExitStack() as loads:
        open_since_none = await loads.enter_async_context(Load(site, address, timeout_s=PATIENCE_S))
        assert (await open_since_none.counts_during(asyncio.sleep(0))).clients.keys() == {gateway}
        assert await problem_codes(ingresses, address, "none") == {"AddressLost", "ClientMayForge"}
        through_switch = await open_since_none.counts_during(switch("v1", "a PROXY header v1"))
        assert losses(through_switch) == ({}, [], OPEN_CONNECTIONS)
        assert client in through_switch.clients
        assert through_switch.clients.keys() <= {gateway, client}

        open_since_v1 = await loads.enter_async_context(Load(site, address, timeout_s=PATIENCE_S))
        for header, described_as, seen in (
            ("v2", "a PROXY header v2", client),
            ("", "no PROXY header", gateway),
        ):
            await open_since_none.take()
            during = (
                await open_since_v1.counts_during(switch(header, described_as)),
                await open_since_none.take(),
            )
            after = (
                await open_since_v1.counts_during(asyncio.sleep(0)),
                await open_since_none.take(),
            )
            for period, begun in (
                *zip(during, (client, gateway), strict=True),
                *zip(after, (client, gateway), strict=True),
            ):
                assert losses(period) == ({}, [], OPEN_CONNECTIONS)
                assert period.clients.keys() <= {client, seen}
                assert period.open_clients.keys() == {begun}
            assert {who for period in after for who in period.clients} == {seen}
            if header:
                assert await problem_codes(ingresses, address, header) == set()


async def checked(
    site: Site, name: str, *options: str, through: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the report of `fairlead ingress check` about a Service, run as a command. Its exit
    status must match."""
    argv = [
        "fairlead",
        "ingress",
        "check",
        name,
        "--kubeconfig",
        str(site.directory.kubeconfig_inside),
        "--host",
        HOSTS[0],
    ]
    code, output, errors = await site.exec(CLIENT, [*through, *argv, *options, "-o", "json"])
    assert output, errors
    report: dict[str, Any] = json.loads(output)
    assert (code == 3) == any(
        each["severity"] in ("security", "error") for each in report["findings"]
    )
    assert code in (0, 3)
    return report


async def problem_codes(ingresses: Ingresses, address: str, sends: str) -> set[str]:
    """Return the findings of a check of the Service and of the pod behind it."""
    behind = f"{ingresses.pods['haproxy'][0]}:{EITHER_PORT}"
    argv = [
        "fairlead",
        "ingress",
        "check",
        f"{address}:80",
        "--behind",
        behind,
        "--host",
        HOSTS[0],
        "--echo",
        "/",
    ]
    _, output, errors = await ingresses.site.exec(
        CLIENT, [*argv, "--proxy-protocol", sends, "-o", "json"]
    )
    assert output, errors
    return {
        each["code"]
        for each in json.loads(output)["findings"]
        if each["severity"] in ("security", "error")
    }


async def plain(site: Site, address: str) -> dict[str, Any]:
    """Return the application's answer over HTTP; an empty dictionary without one."""
    code, output, _ = await site.exec(
        CLIENT, ["curl", "-sf", "--max-time", "2", "-H", f"Host: {HOSTS[0]}", f"http://{address}/"]
    )
    answer: dict[str, Any] = {} if code else json.loads(output)
    return answer


async def is_gone(site: Site, address: str) -> bool:
    return not await plain(site, address)


def losses(period: Period) -> tuple[dict[str, int], list[Broken], int]:
    """Return the failed new connections by error, the broken open ones, and the number of open
    ones."""
    return period.failures, period.broken, period.open_connections


def to_nginx(name: str, port: int, header: str = "", **spec: Any) -> dict[str, Any]:
    """Return a Service of class proxy for a port of nginx."""
    annotations = {"fairlead.io/proxy-protocol": header} if header else {}
    ports = [{"name": "web", "port": 80, "targetPort": port}]
    fields = {"selector": {"app": "nginx"}, "loadBalancerClass": PROXY, "ports": ports} | spec
    return service(name, annotations=annotations, **fields)


def to_either(header: str) -> dict[str, Any]:
    """Return a Service of class proxy for the port of HAProxy that accepts connections with and
    without a header."""
    annotations = {"fairlead.io/proxy-protocol": header} if header else {}
    ports = [{"name": "web", "port": 80, "targetPort": EITHER_PORT}]
    return service(
        "either",
        annotations=annotations,
        selector={"app": "haproxy"},
        loadBalancerClass=PROXY,
        ports=ports,
    )


async def call_over_tls(site: Site, address: str, name: str) -> dict[str, Any]:
    """Return the answer of an application to the client, over TLS with SNI."""
    where = f"[{address}]" if ":" in address else address
    argv = [
        "curl",
        "-sk",
        "--max-time",
        "5",
        "--connect-to",
        f"{name}:443:{where}:443",
        f"https://{name}/",
    ]
    code, output, errors = await site.exec(CLIENT, argv)
    assert code == 0, f"{name} at {address}: {code} {errors}"
    answer: dict[str, Any] = json.loads(output)
    return answer


def plan(ingresses: Ingresses, entry: Entry, tls: bool, family: int) -> Plan:
    """Return a plan of `fairlead ingress check` for the Service and the pod behind it."""
    front = ingresses.services[entry][family], 443 if tls else 80
    own = ingresses.pods[entry.controller][family], ingresses.port(entry.trust, tls=tls)
    entry_points = [EntryPoint(*end, tls, HOSTS[0]) for end in (front, own)]
    return Plan(
        (Target(entry_points[0], (("pod", entry_points[1]),)),),
        entry.sends,
        echo=True,
        client="",
        timeout_s=10,
    )
