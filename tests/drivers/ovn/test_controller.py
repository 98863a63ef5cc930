"""Class ovn from the view of a user: kubectl, the embedded API server, a controller in this
process, and a real OVN with packets."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from tests.drivers.ovn.cluster import OVN, first_answer, serving
from tests.drivers.ovn.traffic import connect
from tests.roles.cluster import Cluster, until

from fairlead.cli.ovn import ovn
from fairlead.cli.status import status
from fairlead.lab import process
from fairlead.lab.ovn.layout import PODS, ROUTER
from fairlead.lab.ovn.site import CLIENT_ADDRESS, OvnSite
from fairlead.lab.ports import free_port
from fairlead.sections import OvnConfig


@pytest.fixture
async def cluster(site: OvnSite, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster whose controller serves class ovn and the classes of gateways."""
    section = OvnConfig(
        northbound=("unix:replaced",),
        cluster_id="replaced",
        router=ROUTER,
        switches=(PODS,),
        drain_timeout_s=10.0,
    )
    async with serving(site, tmp_path, section, "life-1") as made:
        yield made


async def test_a_service_is_published_served_changed_and_deleted(
    cluster: Cluster, site: OvnSite
) -> None:
    first, *others = site.pods
    await cluster.set_endpoints("web", *((pod.address, "life-1", True) for pod in others))
    await cluster.apply("web", loadBalancerClass=OVN)
    (address,) = await cluster.addresses("web")
    client = site.namespace("client")
    answer = await first_answer(client, address)
    assert answer.peer == CLIENT_ADDRESS
    assert answer.pod in {pod.name for pod in others}
    await cluster.has("web", Programmed="True/Programmed", Ready="True/EndpointsReady")

    await cluster.set_endpoints("web", (first.address, "life-1", True))

    async def moved() -> bool:
        return (await first_answer(client, address)).pod == first.name

    await until(moved, "connections to the new pod")

    await cluster.kubectl("delete", "service", "web")

    async def refused() -> bool:
        try:
            (await connect(client, address)).close()
        except ConnectionRefusedError:
            return True
        return False

    async def gone() -> bool:
        return not await site.central.rows("Load_Balancer")

    await until(refused, "refused connections")
    await until(gone, "deletion of the row")


async def test_the_services_of_other_classes_do_not_depend_on_ovn(
    cluster: Cluster, site: OvnSite
) -> None:
    server = process.one(site.lab, "ovn/ovsdb-nb")
    await server.kill()
    await cluster.set_endpoints("web", (site.pods[0].address, "life-1", True))
    await cluster.apply("direct")
    await cluster.addresses("direct")
    await cluster.apply("web", loadBalancerClass=OVN)
    await cluster.has("web", Programmed="False/Unavailable")
    await cluster.kubectl("delete", "service", "direct")
    await site.central.start_database("nb")
    (served,) = await cluster.addresses("web")
    answer = await first_answer(site.namespace("client"), served)
    assert answer.pod == site.pods[0].name


async def test_status_shows_rows_and_a_database_that_is_not_connected(
    cluster: Cluster, site: OvnSite
) -> None:
    await cluster.stop_controller()
    cluster.web = f"127.0.0.1:{free_port()}"
    await cluster.start_controller()
    await cluster.set_endpoints("web", *((pod.address, "life-1", True) for pod in site.pods))
    await cluster.apply("web", loadBalancerClass=OVN)
    (address,) = await cluster.addresses("web")

    async def shown() -> str:
        result = await asyncio.to_thread(CliRunner().invoke, status, ["--address", cluster.web])
        return result.output

    async def installed() -> bool:
        return "installed" in await shown()

    await until(installed, "the row in fairlead status")
    (line,) = [each for each in (await shown()).splitlines() if f"{address}:80/TCP" in each]
    assert line.split()[0] == f"{cluster.namespace}/web"
    assert all(f"{pod.address}:8080 16" in line for pod in site.pods), line
    assert f"{ROUTER}, {PODS}" in line
    assert "not connected" not in await shown()

    server = process.one(site.lab, "ovn/ovsdb-nb")
    await server.kill()
    try:

        async def reported() -> bool:
            return "OVN_Northbound is not connected, and its state is" in await shown()

        await until(reported, "the problem in fairlead status")
        assert f"{address}:80/TCP" in await shown()
    finally:
        await site.central.start_database("nb")

    async def connected() -> bool:
        return "not connected" not in await shown()

    await until(connected, "a connection to the new server")


async def test_leftovers_are_listed_and_deleted(
    cluster: Cluster, site: OvnSite, tmp_path: Path
) -> None:
    await cluster.set_endpoints("web", (site.pods[0].address, "life-1", True))
    await cluster.apply("web", loadBalancerClass=OVN)
    await cluster.addresses("web")
    await cluster.stop_controller()
    await site.central.control("nb", "lb-add", "theirs", "203.0.113.99:80", "10.244.1.10:80")
    assert cluster.ovn is not None
    section = {
        "northbound": list(cluster.ovn.northbound),
        "router": ROUTER,
        "clusterId": cluster.namespace,
    }
    config = tmp_path / "fairlead.yaml"
    config.write_text(yaml.safe_dump({"ovn": section}))
    common = ["gc", "--config", str(config), "--kubeconfig", str(cluster.kubeconfig)]
    assert "no leftovers" in await command(*common)
    await cluster.kubectl(
        "patch", "service", "web", "--type=merge", "-p", '{"metadata":{"finalizers":null}}'
    )
    await cluster.kubectl("delete", "service", "web")
    listed = await command(*common)
    assert f"{cluster.namespace}/web" in listed
    assert "nothing was deleted" in listed
    assert len(await site.central.rows("Load_Balancer")) == 2
    await command(*common, "--delete")
    assert [row["name"] for row in await site.central.rows("Load_Balancer")] == ["theirs"]


async def command(*arguments: str) -> str:
    """Return the output of `fairlead ovn`, which runs an event loop of its own."""
    result = await asyncio.to_thread(CliRunner().invoke, ovn, arguments)
    assert result.exit_code == 0, result.output
    return result.output
