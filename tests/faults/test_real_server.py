"""kube-apiserver and etcd are killed and restarted, with the same data or with older data, in a lab
with load.

No open or new connection fails, and in the end every reflector shows exactly the objects of the
server. Processes, packets, SIGKILLs and the backups of etcd are real."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from tests.e2e.load import GATEWAY, Load, Web, fetch, until
from tests.faults.real import RealServer

from fairlead.errors import FairleadError
from fairlead.kube.client import Client
from fairlead.kube.objects import ENDPOINT_SLICES, SERVICES, ObjectKey, Resource
from fairlead.kube.reflector import Reflector
from fairlead.lab.kubeapiserver import ETCD_LABEL, LABEL
from fairlead.lab.objects import PODS
from fairlead.lab.site import Site
from fairlead.probe.steady import Period

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

PLACEMENT = ("node1", "node1", "node2")
ROLES = {"control": "controller", GATEWAY: "gateway", "node1": "node", "node2": "node"}
CACHED: tuple[Resource[Any], ...] = (SERVICES, ENDPOINT_SLICES, PODS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(real_programs: None) -> AsyncIterator[Site]:
    async with Site.create(
        f"past{os.getpid()}", nodes=2, gateways=1, clients=1, apiserver="real"
    ) as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web(site: Site) -> Web:
    web = Web(site)
    await web.create()
    await web.place(PLACEMENT)
    return web


@asynccontextmanager
async def caches(site: Site) -> AsyncIterator[Mapping[str, Reflector[Any]]]:
    """Return reflectors that receive every change within the block."""
    async with site.client() as client, asyncio.TaskGroup() as group:
        reflectors = {
            resource.plural: Reflector(client, resource, ceiling_s=2.0) for resource in CACHED
        }

        async def follow(reflector: Reflector[Any]) -> None:
            async for _ in reflector.changes():
                pass

        following = [group.create_task(follow(reflector)) for reflector in reflectors.values()]
        try:
            yield reflectors
        finally:
            for task in following:
                task.cancel()


async def agree(site: Site, reflectors: Mapping[str, Reflector[Any]]) -> None:
    """Wait until every cache shows exactly what the server has."""
    async with site.client() as client:
        for resource in CACHED:
            reflector = reflectors[resource.plural]

            async def equal(
                resource: Resource[Any] = resource, reflector: Reflector[Any] = reflector
            ) -> bool:
                there = {
                    ObjectKey(each.metadata.namespace, each.metadata.name): each
                    for each in await client.list(resource)
                }
                return dict(reflector.objects) == there

            await until(equal, f"equality of the cache of {resource.plural} and the server")


def check_unharmed(period: Period) -> None:
    assert period.requests > 50
    assert (period.failed, period.broken) == (0, []), period


async def create(client: Client, name: str) -> None:
    spec = {"type": "LoadBalancer", "selector": {"app": "nobody"}, "ports": [{"port": 80}]}
    await client.create(
        SERVICES, {"metadata": {"name": name, "namespace": "default"}, "spec": spec}
    )


async def addresses(site: Site) -> dict[str, str]:
    """Return each Service's address; empty if it has none yet."""
    async with site.client() as client:
        services = await client.list(SERVICES, namespace="default")
    wanted = (each for each in services if each.spec.type == "LoadBalancer")
    return {
        each.metadata.name: "".join(i.ip for i in each.status.load_balancer.ingress)
        for each in wanted
    }


async def all_served(site: Site, names: set[str]) -> dict[str, str]:
    """Wait until exactly these Services exist, each with a unique address, and every role shows
    exactly them."""

    async def served() -> bool:
        given = await addresses(site)
        return (
            given.keys() == names and all(given.values()) and len(set(given.values())) == len(given)
        )

    await until(served, "a unique address for every Service")
    for host in ROLES:
        seen: set[str] = set()

        async def shown(host: str = host, seen: set[str] = seen) -> bool:
            seen.clear()
            seen |= (await fetch(site, host, "/state"))["services"].keys() - {"default/kubernetes"}
            return seen == {f"default/{name}" for name in names}

        try:
            await until(shown, "the roles")
        except AssertionError:
            words = site.directory.log(f"{host}/{ROLES[host]}").read_text()[-3000:]
            raise AssertionError(
                f"{host} shows {seen}, existing are {names}; its log:\n{words}"
            ) from None
    return await addresses(site)


async def create_services_continuously(site: Site, begin: int, names: set[str]) -> None:
    """Create Services continuously; `names` collects those that the server accepted."""
    async with site.client() as client:
        for number in range(begin, begin + 20):
            name = f"load-{number}"
            try:
                await create(client, name)
                names.add(name)
            except FairleadError:
                await asyncio.sleep(0.1)
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(LABEL, id="kube-apiserver", marks=pytest.mark.soak),
        pytest.param(ETCD_LABEL, id="etcd"),
    ],
)
async def test_no_request_fails_and_no_service_is_lost_when_the_api_server_or_etcd_is_killed(
    web: Web, part: str
) -> None:
    server = RealServer(web.site)
    names: set[str] = set()

    async def die_and_return() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(create_services_continuously(web.site, 0, names))
            await asyncio.sleep(0.5)
            await server.kill(part)
            await asyncio.sleep(0.3)
            server.start(part)
            await server.ready()
        # A Service also exists if the server accepted it without an answer.
        await all_served(web.site, {"web"} | set(await addresses(web.site)))
        await web.await_weights(PLACEMENT)

    async with caches(web.site) as reflectors, Load(web.site, web.address) as load:
        check_unharmed(await load.counts_during(die_and_return()))
        await agree(web.site, reflectors)
        assert names <= (await addresses(web.site)).keys()
        async with web.site.client() as client:
            for name in set(await addresses(web.site)) - {"web"}:
                await client.delete(SERVICES, ("default", name))
        await all_served(web.site, {"web"})
        await agree(web.site, reflectors)


@pytest.mark.soak
async def test_roles_follow_an_etcd_that_is_restored_from_an_older_backup(web: Web) -> None:
    """One Service was deleted after the backup and exists again. Another was created after the
    backup and is gone, with the address of the first. The Service under load is not affected."""
    site = web.site
    server = RealServer(site)
    async with site.client() as client:
        await create(client, "back-again")
        before = await all_served(site, {"web", "back-again"})
        await server.save()
        await client.delete(SERVICES, ("default", "back-again"))
        await all_served(site, {"web"})
        await create(client, "never-was")
        # These are more versions than the restored server reaches soon.
        for _ in range(100):
            await client.patch(
                SERVICES, ("default", "never-was"), {"metadata": {"annotations": {"n": str(_)}}}
            )
        lost = await all_served(site, {"web", "never-was"})
        assert lost["never-was"] == before["back-again"]

    async def go_back() -> None:
        await server.restore()
        assert await all_served(site, {"web", "back-again"}) == before
        await web.await_weights(PLACEMENT)

    async with caches(site) as reflectors:
        await agree(site, reflectors)
        async with Load(site, web.address) as load:
            check_unharmed(await load.counts_during(go_back()))
        await agree(site, reflectors)
        async with site.client() as client:
            await create(client, "afterwards")
        given = await all_served(site, {"web", "back-again", "afterwards"})
        assert given | before == given
        await agree(site, reflectors)
