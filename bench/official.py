"""The same work with the official Python client: its SharedInformer, one for each kind, and a plan
of the members.

In: as `reading`. Out: the same stages and figures. Runs in its own virtual environment
(`requirements.lock`), without Fairlead. The plan is simpler than Fairlead's: for each Service the
nodes with ready pods, their addresses and weights, planned at each event and handed over at once.
The client's own cache holds the objects, as it creates them.
"""

import json
import sys
import tempfile
import threading
from collections import Counter
from typing import Any

from bench.figures import Figures
from kubernetes import client
from kubernetes.informer import ADDED, MODIFIED, SharedInformer

Key = tuple[str, str]


class Cluster:
    """The objects, and the members of every Service."""

    def __init__(self, figures: Figures, expected: dict[str, int]) -> None:
        self._figures = figures
        self._missing = expected
        self._lock = threading.Lock()
        self.synced = threading.Event()
        self.services: dict[Key, Any] = {}
        self.slices: dict[Key, dict[str, Any]] = {}
        self.addresses: dict[str, str] = {}
        self.members: dict[Key, dict[str, tuple[str, int]]] = {}

    def service(self, service: Any) -> None:
        self.services[service.metadata.namespace, service.metadata.name] = service
        self._arrived("services")

    def slice(self, slice_: Any) -> None:
        metadata = slice_.metadata
        key = metadata.namespace, metadata.labels.get("kubernetes.io/service-name", "")
        self.slices.setdefault(key, {})[metadata.name] = slice_
        if self.synced.is_set():
            self.plan(key)
        else:
            self._arrived("slices")

    def node(self, node: Any) -> None:
        internal = [
            address.address for address in node.status.addresses if address.type == "InternalIP"
        ]
        self.addresses[node.metadata.name] = internal[0]
        self._arrived("nodes")

    def plan(self, key: Key) -> None:
        """Plan the members of one Service; record a call if they changed."""
        weights: Counter[str] = Counter()
        for slice_ in self.slices.get(key, {}).values():
            weights.update(
                each.node_name
                for each in slice_.endpoints or ()
                if each.conditions.ready is not False
            )
        members = {
            name: (self.addresses[name], weight)
            for name, weight in weights.items()
            if name in self.addresses
        }
        if members != self.members.get(key):
            self.members[key] = members
            self._figures.applied([key[1]])

    def plan_all(self) -> None:
        for key, service in self.services.items():
            if service.spec.type == "LoadBalancer":
                self.plan(key)

    def _arrived(self, kind: str) -> None:
        with self._lock:
            self._missing[kind] -= 1
            if all(count <= 0 for count in self._missing.values()):
                self.synced.set()


def configuration(access: dict[str, Any]) -> Any:
    made = client.Configuration(host=access["server"])
    if access.get("token"):
        made.api_key = {"authorization": f"Bearer {access['token']}"}
    if access.get("authority_pem"):
        # The file stays until the process ends: the client opens it by name.
        authority = tempfile.NamedTemporaryFile("w", suffix=".pem", delete=False)  # noqa: SIM115
        authority.write(access["authority_pem"])
        authority.close()
        made.ssl_ca_cert = authority.name
        made.tls_server_name = access["server_name"]
    return made


def main() -> None:
    figures = Figures()
    start = json.loads(sys.stdin.readline())
    api = client.ApiClient(configuration(start["access"]))
    cluster = Cluster(figures, start["expected"])
    core, discovery = client.CoreV1Api(api), client.DiscoveryV1Api(api)
    figures.stage("started")
    informers = []
    for listing, take in (
        (core.list_service_for_all_namespaces, cluster.service),
        (discovery.list_endpoint_slice_for_all_namespaces, cluster.slice),
        (core.list_node, cluster.node),
    ):
        informer = SharedInformer(listing)
        informer.add_event_handler(ADDED, take)
        informer.add_event_handler(MODIFIED, take)
        informer.start()
        informers.append(informer)
    cluster.synced.wait()
    figures.stage("synced")
    cluster.plan_all()
    figures.stage("planned")
    while figures.answer(sys.stdin.readline()):
        pass


if __name__ == "__main__":
    main()
