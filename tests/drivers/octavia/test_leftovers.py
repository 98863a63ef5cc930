"""`fairlead octavia gc`, as users run it, at a real Octavia: what is listed, deleted and left
alone."""

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
from tests.openstack.front import Answer

from fairlead.drivers.octavia.marks import Owner
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.objects import NAMESPACES, SERVICES, ObjectKey
from fairlead.lab import settings as lab
from fairlead.lab.apiserver import ApiServer
from fairlead.model import LoadBalancer, ServiceKey, SharedOrAdopted
from fairlead.roles.octavia import SYSTEM


class Place:
    """A cluster without a controller, and functions that create what its controller would have
    created."""

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
        self.site.anew()
        key = ServiceKey("default", name)
        octavia = settings(
            shared_or_adopted=SharedOrAdopted(on) if on else None, checks=None, monitor_types=()
        )
        wanted: LoadBalancer = msgspec.structs.replace(
            service(listener(port), uid=uid, octavia=octavia), service=key
        )
        await self.site.bring(wanted, key=key)
        (tree,) = (await self.site.found(key)).balancers
        return tree.id

    async def live(self, name: str) -> str:
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
        ways = ("--config", str(self.config)) + (
            () if "--cluster" in arguments else ("--kubeconfig", str(self.kubeconfig))
        )
        child = await asyncio.create_subprocess_exec(
            program, "octavia", "gc", *ways, *arguments, stdout=pipe, stderr=pipe
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
        client = clients.without_auth(octavia=self.site.front.url).load_balancer
        return {each.id for each in client.load_balancers(project_id=self.site.front.project)}


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


async def test_what_a_service_that_is_gone_has_left(place: Place) -> None:
    """One Service exists, one is deleted, one was recreated under its name, and one is deleted from
    a load balancer that it shared."""
    client = clients.without_auth(octavia=place.site.front.url)
    by_hand = client.load_balancer.create_load_balancer(
        name="by hand", vip_subnet_id=SUBNET, tags=["theirs"]
    ).id
    clients.settled(client, by_hand)
    living = await place.make("lives", await place.live("lives"))
    dead = await place.make("gone", "uid-gone")
    renewed = await place.make("renewed", "uid-before")
    await place.live("renewed")
    await place.make("guest", "uid-guest", on=living, port=25)
    found = await place.listed()
    assert {
        each["service"]: (each["load_balancer"], each["goes"]) for each in found["leftovers"]
    } == {
        "default/gone": (dead, "load balancer"),
        "default/renewed": (renewed, "load balancer"),
        "default/guest": (living, "listeners and pools"),
    }
    assert place.balancers() == {by_hand, living, dead, renewed}
    status, output, _ = await place.gc()
    assert status == 0
    assert output.startswith("SERVICE           LOAD BALANCER")
    assert "nothing was deleted: see --delete" in output
    found = await place.listed("--delete")
    assert [each["deleted"] for each in found["leftovers"]] == [True] * 3
    assert place.balancers() == {by_hand, living}
    (tree,) = (await place.site.found(ServiceKey("default", "lives"))).balancers
    assert ([each.port for each in tree.listeners], tree.others) == ([80], 0)
    assert "no leftovers" in (await place.gc())[1]


async def test_a_cluster_that_is_gone(place: Place) -> None:
    """The listeners of the host and of the guest are both left: the last deletion on the load
    balancer deletes it."""
    dead = str(uuid.uuid4())
    living = await place.make("lives", await place.live("lives"))
    host = await place.make("web", "uid-web", of=dead)
    await place.make("mail", "uid-mail", of=dead, on=host, port=25)
    found = await place.listed()
    assert found["leftovers"] == []
    assert {
        "cluster": dead,
        "load_balancers": 1,
        "names": ["fairlead_test_default_web"],
        "network": 0,
    } in found["other_clusters"]
    found = await place.listed("--cluster", dead, "--delete")
    assert [(each["service"], each["deleted"]) for each in found["leftovers"]] == [
        ("default/mail", True),
        ("default/web", True),
    ]
    assert place.balancers() == {living}


async def test_it_is_said_what_could_not_be_deleted(place: Place) -> None:
    await place.make("gone", "uid-gone")
    place.site.front.fate = lambda call: Answer(403, "not today") if call.writes else None
    status, output, errors = await place.gc("--delete")
    assert status == 1
    assert output.splitlines()[1].endswith("no")
    assert "Octavia of region R answered 403: not today" in errors
    assert len(place.balancers()) == 1


async def test_it_must_be_said_which_cloud(place: Place) -> None:
    place.config.write_text("{}")
    status, _, errors = await place.gc()
    assert status == 1
    assert "give --cloud, or --config with a section octavia" in errors
