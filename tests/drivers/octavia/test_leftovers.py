"""`fairlead octavia gc`, as users run it, at a real Octavia: which objects it lists, deletes and
leaves unchanged."""

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from tests.drivers.octavia.site import SUBNET, Site, listener, service, settings
from tests.openstack import clients
from tests.openstack.fault_proxy import ErrorResponse

from fairlead.drivers.octavia.marks import Owner
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.objects import NAMESPACES, SERVICES, ObjectKey
from fairlead.lab import settings as lab
from fairlead.lab.apiserver import ApiServer
from fairlead.model import LoadBalancer, ServiceKey, SharedOrAdopted
from fairlead.roles.octavia import SYSTEM


class Place:
    """A cluster without a controller, and functions that create the load balancers that its
    controller would have created."""

    def __init__(self, site: Site, client: Client, access: Access, folder: Path, uid: str) -> None:
        self.site = site
        self.client = client
        self.uid = uid
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(lab.kubeconfig("gc", access))
        self.config = folder / "fairlead.yaml"
        octavia = {"cloud": "test", "cloudsFile": site.config.clouds_file, "callsPerS": 1000}
        self.config.write_text(yaml.safe_dump({"octavia": octavia}))

    async def make(self, name: str, uid: str, *, of: str = "", on: str = "", port: int = 80) -> str:
        """Create a load balancer for the Service of this name, and return its id. `on`: create its
        listeners on this load balancer instead."""
        self.site.owner = Owner(of or self.uid, "test")
        self.site.restart()
        key = ServiceKey("default", name)
        octavia = settings(
            shared_or_adopted=SharedOrAdopted(on) if on else None, checks=None, monitor_types=()
        )
        wanted: LoadBalancer = msgspec.structs.replace(
            service(listener(port), uid=uid, octavia=octavia), service=key
        )
        await self.site.reconcile(wanted, key=key)
        (tree,) = (await self.site.found(key)).balancers
        return tree.id

    async def create_service(self, name: str) -> str:
        """Create a Service, and return its uid."""
        body = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]},
        }
        await self.client.create(SERVICES, body, namespace="default")
        return (await self.client.get(SERVICES, ObjectKey("default", name))).metadata.uid

    async def gc(self, *arguments: str) -> tuple[int, str, str]:
        """Run the command. Return exit status, output and errors."""
        program = str(Path(sys.executable).with_name("fairlead"))
        pipe = asyncio.subprocess.PIPE
        options = ("--config", str(self.config)) + (
            () if "--cluster" in arguments else ("--kubeconfig", str(self.kubeconfig))
        )
        child = await asyncio.create_subprocess_exec(
            program, "octavia", "gc", *options, *arguments, stdout=pipe, stderr=pipe
        )
        async with asyncio.timeout(120):
            output, errors = await child.communicate()
        assert child.returncode is not None
        return child.returncode, output.decode(), errors.decode()

    async def listed(self, *arguments: str) -> dict[str, Any]:
        status, output, errors = await self.gc(*arguments, "-o", "json")
        assert status == 0, errors
        found: dict[str, Any] = json.loads(output)
        return found

    def balancers(self) -> set[str]:
        client = clients.without_auth(octavia=self.site.proxy.url).load_balancer
        return {each.id for each in client.load_balancers(project_id=self.site.proxy.project)}


@asynccontextmanager
async def placed(site: Site, folder: Path) -> AsyncIterator[Place]:
    async with ApiServer() as server, Client(Access(server.url)) as client:
        if SYSTEM not in (await client.request("GET", "/api/v1/namespaces")).decode():
            await client.request("POST", "/api/v1/namespaces", body={"metadata": {"name": SYSTEM}})
        uid = (await client.get(NAMESPACES, ObjectKey("", SYSTEM))).metadata.uid
        yield Place(site, client, Access(server.url), folder, uid)


@pytest.fixture
async def place(site: Site, tmp_path: Path) -> AsyncIterator[Place]:
    async with placed(site, tmp_path) as made:
        yield made


@pytest.mark.soak
async def test_load_balancers_and_listeners_of_deleted_services_are_listed_and_deleted(
    place: Place,
) -> None:
    """One Service exists, one is deleted, one was recreated under its name, and one is deleted from
    a load balancer that it shared."""
    client = clients.without_auth(octavia=place.site.proxy.url)
    by_hand = client.load_balancer.create_load_balancer(
        name="by hand", vip_subnet_id=SUBNET, tags=["theirs"]
    ).id
    clients.wait_settled(client, by_hand)
    existing = await place.make("exists", await place.create_service("exists"))
    leftover = await place.make("gone", "uid-gone")
    renewed = await place.make("renewed", "uid-before")
    await place.create_service("renewed")
    await place.make("guest", "uid-guest", on=existing, port=25)
    found = await place.listed()
    assert {
        each["service"]: (each["load_balancer"], each["resource"]) for each in found["leftovers"]
    } == {
        "default/gone": (leftover, "load balancer"),
        "default/renewed": (renewed, "load balancer"),
        "default/guest": (existing, "listeners and pools"),
    }
    assert place.balancers() == {by_hand, existing, leftover, renewed}
    status, output, _ = await place.gc()
    assert status == 0
    assert output.startswith("SERVICE           LOAD BALANCER")
    assert "nothing was deleted: see --delete" in output
    found = await place.listed("--delete")
    assert [each["deleted"] for each in found["leftovers"]] == [True] * 3
    assert place.balancers() == {by_hand, existing}
    (tree,) = (await place.site.found(ServiceKey("default", "exists"))).balancers
    assert ([each.port for each in tree.listeners], tree.others) == ([80], 0)
    assert "no leftovers" in (await place.gc())[1]


@pytest.mark.soak
async def test_load_balancers_of_another_cluster_are_deleted_only_with_the_option_cluster(
    place: Place,
) -> None:
    """The listeners of the host and of the guest are both leftovers. The last deletion also deletes
    the load balancer."""
    other_cluster = str(uuid.uuid4())
    existing = await place.make("exists", await place.create_service("exists"))
    host = await place.make("web", "uid-web", of=other_cluster)
    await place.make("mail", "uid-mail", of=other_cluster, on=host, port=25)
    found = await place.listed()
    assert found["leftovers"] == []
    assert {
        "cluster": other_cluster,
        "load_balancers": 1,
        "names": ["fairlead_test_default_web"],
        "network": 0,
    } in found["other_clusters"]
    found = await place.listed("--cluster", other_cluster, "--delete")
    assert [(each["service"], each["deleted"]) for each in found["leftovers"]] == [
        ("default/mail", True),
        ("default/web", True),
    ]
    assert place.balancers() == {existing}


@pytest.mark.soak
async def test_a_failed_deletion_is_reported(place: Place) -> None:
    await place.make("gone", "uid-gone")
    place.site.proxy.fault = lambda call: ErrorResponse(403, "not today") if call.writes else None
    status, output, errors = await place.gc("--delete")
    assert status == 1
    assert output.splitlines()[1].endswith("no")
    assert "Octavia of region R answered 403: not today" in errors
    assert len(place.balancers()) == 1


async def test_a_command_without_a_cloud_is_rejected(place: Place) -> None:
    place.config.write_text("{}")
    status, _, errors = await place.gc()
    assert status == 1
    assert "give --cloud, or --config with a section octavia" in errors
