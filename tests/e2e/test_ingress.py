"""Ingress behind a load balancer: applications see the client's address, and `fairlead ingress check` finds what is wrong."""

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio
from tests.conftest import needed
from tests.e2e.ingress import CONTROLLERS, HOSTS, BalancerDoor, Ingresses
from tests.e2e.load import addresses_of, until

from fairlead.errors import Refused
from fairlead.ingress.call import Door
from fairlead.ingress.check import Plan, Report
from fairlead.ingress.check import check as make_check
from fairlead.ingress.manifests import objects
from fairlead.ingress.service import Entrance
from fairlead.ingress.settings import Controller, Header, Wish, settings
from fairlead.lab import namespace
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

CLIENT = "client1"
NAMES = {"nginx": "ingress-nginx-controller", "haproxy": "haproxy-kubernetes-ingress"}
ResultT = TypeVar("ResultT")

SET_UPS: list[tuple[str, Header, set[str]]] = [
    ("off", "none", {"address-lost"}),
    ("off", "v1", {"header-not-expected"}),
    ("off", "v2", {"header-not-expected"}),
    ("narrow", "v1", set()),
    ("narrow", "v2", set()),
    # Nothing stands before our own headers here, and they come from the balancer, who is trusted.
    ("narrow", "none", {"header-missing", "client-may-forge"}),
    ("wide", "v2", {"client-may-forge"}),
]
"""How the controller is set up, what the balancer sends, what must be found wrong."""


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


async def check(site: Site, *arguments: str, host: str = CLIENT) -> tuple[int, dict[str, Any]]:
    """Exit status and report."""
    argv = ["fairlead", "ingress", "check", *arguments, "--host", HOSTS[0], "--echo", "/", "--timeout", "2", "-o", "json"]
    code, output, errors = await site.exec(host, argv)
    assert output, errors
    return code, json.loads(output)


def wrong(report: dict[str, Any]) -> set[str]:
    return {each["code"] for each in report["findings"] if each["level"] in ("security", "error")}


async def ask(site: Site, address: str, port: int, name: str) -> dict[str, Any]:
    """What an application says to the client, over TLS with SNI."""
    where = f"[{address}]" if ":" in address else address
    argv = ["curl", "-sk", "--max-time", "5", "--connect-to", f"{name}:{port}:{where}:{port}", f"https://{name}:{port}/"]
    code, output, errors = await site.exec(CLIENT, argv)
    assert code == 0, f"{name} at {address} {port}: {code} {errors}"
    said: dict[str, Any] = json.loads(output)
    return said


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def direct(ingresses: Ingresses) -> dict[Controller, tuple[str, ...]]:
    """The addresses of Services as `fairlead ingress` prints them for class direct. Only their pods are ours: selected by other
    labels, and with ports that have no names."""
    found = {}
    for controller in CONTROLLERS:
        wish = Wish(controller, "direct", namespace="default")
        (service,) = objects(wish, settings(wish))
        service["spec"] |= {"selector": {"app": controller}, "ipFamilyPolicy": "RequireDualStack"}
        service["spec"]["ports"] = [port | {"targetPort": port["port"]} for port in service["spec"]["ports"]]
        await ingresses.site.apply([service])
        found[controller] = await addresses_of(ingresses.site, NAMES[controller])
        await until(partial(answers, ingresses.site, found[controller]), f"{controller} through class direct")
    return found


async def answers(site: Site, addresses: tuple[str, ...]) -> bool:
    argv = ["curl", "-s", "--max-time", "1", "-o", "/dev/null"]
    codes = [
        (await site.exec(CLIENT, [*argv, f"http://[{each}]/" if ":" in each else f"http://{each}/"]))[0] for each in addresses
    ]
    return not any(codes)


@pytest.mark.parametrize("controller", CONTROLLERS)
async def test_applications_see_the_client_through_class_direct(
    ingresses: Ingresses, direct: dict[Controller, tuple[str, ...]], controller: Controller
) -> None:
    """Two applications by host name with TLS, both families, no setting anywhere."""
    own = ingresses.site.topology.host(CLIENT).addresses
    for application, name in zip(("app-a", "app-b"), HOSTS, strict=True):
        for address in direct[controller]:
            said = await ask(ingresses.site, address, 443, name)
            assert (said["pod"], said["forwarded_for"]) == (application, own[":" in address])


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("sends", ["v1", "v2"])
async def test_applications_see_the_client_by_the_header(ingresses: Ingresses, controller: Controller, sends: Header) -> None:
    own = ingresses.site.topology.host(CLIENT).addresses
    port = ingresses.doors[BalancerDoor(controller, "narrow", sends, True)]
    for application, name in zip(("app-a", "app-b"), HOSTS, strict=True):
        for address in ingresses.gateway:
            said = await ask(ingresses.site, address, port, name)
            assert (said["pod"], said["forwarded_for"]) == (application, own[":" in address])


@pytest.mark.parametrize("controller", CONTROLLERS)
async def test_each_wrong_set_up_is_found(ingresses: Ingresses, controller: Controller) -> None:
    """With TLS and without, over both families; what is right is not complained of."""
    cases = list(itertools.product(SET_UPS, (False, True), range(2)))
    plans = [plan(ingresses, controller, *set_up[:2], tls, family) for set_up, tls, family in cases]

    async def all_of_them() -> list[Report]:
        return await asyncio.gather(*map(make_check, plans))

    reports = await on_host(ingresses.site, CLIENT, all_of_them)
    for ((variant, sends, expected), tls, family), report in zip(cases, reports, strict=True):
        found = {each.code for each in report.findings if each.level in ("security", "error")}
        assert found == expected, (variant, sends, tls, family, report)
        assert report.wrong == bool(expected)


def plan(ingresses: Ingresses, controller: Controller, variant: str, sends: Header, tls: bool, family: int) -> Plan:
    """The balancer's door for a set-up, and the pod itself behind it."""
    front = ingresses.doors[BalancerDoor(controller, variant, sends, tls)]
    own = ingresses.pods[controller][family], ingresses.port(variant, tls=tls)
    doors = [Door(*end, tls, HOSTS[0]) for end in ((ingresses.gateway[family], front), own)]
    return Plan((Entrance(doors[0], (("pod", doors[1]),)),), sends, echo=True, client="", timeout_s=10)


async def on_host(site: Site, host: str, work: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
    """Do it from a host of the lab: in a thread of its own, for a thread is what a network namespace belongs to."""

    def inside() -> ResultT:
        namespace.enter(site.namespace(host))
        return asyncio.run(work())

    with ThreadPoolExecutor(1) as thread:
        return await asyncio.get_running_loop().run_in_executor(thread, inside)


@pytest.mark.parametrize("controller", CONTROLLERS)
async def test_a_service_is_checked_by_its_name(
    ingresses: Ingresses, direct: dict[Controller, tuple[str, ...]], controller: Controller
) -> None:
    """Class direct: the front, the pod and the node port are tried, nothing is wrong. Where a header is wanted, that is found,
    and that everybody may forge where everybody is believed."""
    site, name = ingresses.site, NAMES[controller]
    way = ("--kubeconfig", str(site.directory.kubeconfig_inside))
    code, report = await check(site, name, *way)
    assert (code, wrong(report)) == (0, set()), report
    assert {row["place"].rpartition(" ")[0] for row in report["calls"]} == {"load balancer", "pod", "node port"}
    codes = {each["code"] for each in report["findings"]}
    assert {"address-seen", "forgery-without-effect"} <= codes
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{name}-wide", "namespace": "default"},
        "spec": {
            "type": "LoadBalancer",
            "externalTrafficPolicy": "Local",
            "loadBalancerClass": "fairlead.io/direct",
            "selector": {"app": controller},
            "ports": [{"name": "https", "port": 443, "targetPort": ingresses.port("wide", tls=True)}],
        },
    }
    await site.apply([service])
    await until(partial(answers_there, site, f"{name}-wide"), "the second Service")
    code, report = await check(site, f"{name}-wide", *way)
    assert (code, wrong(report)) == (3, {"header-missing", "client-may-forge"}), report
    assert any("198.18.254.1, 198.18.254.2 is believed" in each["message"] for each in report["findings"])


async def answers_there(site: Site, name: str) -> bool:
    (address,) = await addresses_of(site, name)
    code, _, _ = await site.exec(CLIENT, ["curl", "-sk", "--haproxy-protocol", "--max-time", "1", f"https://{address}/"])
    return code == 0
