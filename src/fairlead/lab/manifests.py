"""Write manifests to a lab's API server.

In: objects as read from files by `kube.manifests`. Out: the objects are applied (server-side apply)
in the given order. The path of each kind comes from API discovery, so every kind that the server
serves can be applied.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from fairlead.errors import Refused
from fairlead.kube.client import Client
from fairlead.kube.objects import Fields, ObjectMeta, Resource

FIELD_MANAGER = "fairlead-lab"

Manifest = Mapping[str, Any]


class Applied(Fields, frozen=True):
    metadata: ObjectMeta


async def apply(client: Client, manifests: Iterable[Manifest]) -> tuple[str, ...]:
    """Apply each object, and return a name such as `service/web` for each. Raise Refused for a kind
    that the server does not serve."""
    resources: dict[str, dict[str, Resource[Applied]]] = {}
    names = []
    for manifest in manifests:
        version, kind, metadata = (
            manifest["apiVersion"],
            manifest["kind"],
            manifest.get("metadata", {}),
        )
        if version not in resources:
            resources[version] = await _discover(client, version)
        if kind not in resources[version]:
            raise Refused(f"the API server does not serve kind {kind} in {version}")
        resource = resources[version][kind]
        namespace = metadata.get("namespace", "default") if resource.namespaced else ""
        await client.apply(
            resource,
            (namespace, metadata["name"]),
            manifest,
            field_manager=FIELD_MANAGER,
            force=True,
        )
        names.append(f"{kind.lower()}/{metadata['name']}")
    return tuple(names)


async def _discover(client: Client, version: str) -> dict[str, Resource[Applied]]:
    answer = msgspec.json.decode(
        await client.request("GET", f"/apis/{version}" if "/" in version else f"/api/{version}")
    )
    return {
        entry["kind"]: Resource(version, entry["kind"], entry["name"], entry["namespaced"], Applied)
        for entry in answer["resources"]
        if "/" not in entry["name"]
    }
