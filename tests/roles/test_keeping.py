"""Kept addresses of deleted Services, on both API servers: their number, their display, and their
release."""

import json
import secrets
from typing import Any

import yaml
from tests.e2e.kubectl import service
from tests.roles.cluster import Cluster, until

from fairlead.kube.crds import ADDRESS_GRANTS, AddressGrant
from fairlead.kube.objects import NAMESPACES, SERVICES, ObjectKey

KEEP = {"fairlead.io/keep-address": "true"}


async def kept(cluster: Cluster, namespace: str) -> list[AddressGrant]:
    """Return the grants that are kept for Services of this namespace."""
    grants = await cluster.client.list(ADDRESS_GRANTS)
    return [
        each
        for each in grants
        if any(one.namespace == namespace and not one.uid for one in each.spec.holders)
    ]


async def test_services_deleted_at_the_same_time_keep_no_more_addresses_than_permitted(
    cluster: Cluster,
) -> None:
    """All deletions are processed at the same time, so each of them at first finds the number of
    kept addresses of the namespace below the limit."""
    await cluster.stop_controller()
    cluster.keeps = 2
    await cluster.start_controller()
    names = [f"s{number}" for number in range(6)]
    await cluster.kubectl(
        "apply",
        "-f",
        "-",
        stdin=yaml.safe_dump_all([service(name, annotations=KEEP) for name in names]),
    )
    for name in names:
        await cluster.addresses(name)
    await cluster.kubectl("delete", "services", *names, "--wait=false")
    for name in names:
        await cluster.gone(name)
    assert len(await kept(cluster, cluster.namespace)) == 2

    async def all_reported() -> bool:
        found = [
            event for name in names for event in await cluster.events(name, reason="AddressNotKept")
        ]
        return (
            len(
                {event["involvedObject"]["name"] for event in found if "2 of 2" in event["message"]}
            )
            == 4
        )

    await until(all_reported, "Events of four Services whose addresses are not kept")
    for grant in await kept(cluster, cluster.namespace):
        await cluster.client.delete(ADDRESS_GRANTS, ("", grant.metadata.name))


async def test_kept_addresses_are_shown_and_released_with_their_namespace(cluster: Cluster) -> None:
    name = f"kept-{secrets.token_hex(3)}"
    pool = {
        "apiVersion": "fairlead.io/v1alpha1",
        "kind": "AddressPool",
        "metadata": {"name": name},
        "spec": {"addresses": ["198.51.100.77"], "serviceAllocation": {"namespaces": [name]}},
    }
    await cluster.client.create(NAMESPACES, {"metadata": {"name": name}})
    await cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(pool))
    wanted: dict[str, Any] = service(
        "web", annotations=KEEP, ipFamilyPolicy="SingleStack", ipFamilies=["IPv4"]
    )
    key = ObjectKey(name, "web")
    await cluster.client.create(
        SERVICES, wanted | {"metadata": wanted["metadata"] | {"namespace": name}}
    )

    async def shows_address() -> bool:
        return bool((await cluster.client.get(SERVICES, key)).status.load_balancer.ingress)

    await until(shows_address, "an address")
    await cluster.client.delete(SERVICES, key)

    async def shown() -> dict[str, Any]:
        status: dict[str, Any] = json.loads(
            await cluster.kubectl("get", "addresspool", name, "-o", "json")
        ).get("status", {})
        return status if status.get("kept") else {}

    status = await until(shown, "the kept address in the status of the pool")
    [grant] = await kept(cluster, name)
    [entry] = status["kept"]
    assert (entry["namespace"], entry["addresses"], entry["since"]) == (
        name,
        1,
        grant.spec.holders[0].kept_since,
    )
    assert entry["until"] > entry["since"]
    assert grant.spec.holders[0].kept_since in await cluster.kubectl(
        "get", "addressgrant", "198.51.100.77"
    )
    # A real API server without a namespace controller leaves the namespace Terminating forever.
    await cluster.client.delete(NAMESPACES, ObjectKey("", name))

    async def free() -> bool:
        return not await kept(cluster, name)

    await until(free, "the release of the kept address")
    await cluster.kubectl("delete", "addresspool", name)
