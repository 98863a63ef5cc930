"""MetalLB in a lab, unmodified, beside which `bench.announce` measures Fairlead.

In: a lab with a real API server, without Fairlead's roles, and with kube-proxy on its nodes. Out: a
controller on the control host and a speaker on each node, both with their default settings, and
a pool that is announced in layer 2 mode. The programs are those of `sh tools/build.sh metallb`.
MetalLB 0.13.12 is the latest whose Go module can be built without further modules.

Speakers find each other by the addresses of pods with a label, so there is an object for the pod of
each speaker, which no kubelet runs. The CRDs have no schema: the released one of BGPPeer, with a
maximum of 4294967295 for an integer of format int32, is refused by current API servers. There are
no webhooks."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from fairlead.errors import Refused, Unavailable
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.lab import process
from fairlead.lab.kubeapiserver import find_program
from fairlead.lab.objects import PODS
from fairlead.lab.process import Process
from fairlead.lab.site import Site

NAMESPACE, GROUP, LABEL = "metallb-system", "metallb.io", "component=speaker"
KINDS: Mapping[str, str] = {
    "AddressPool": "v1beta1",
    "BFDProfile": "v1beta1",
    "BGPAdvertisement": "v1beta1",
    "BGPPeer": "v1beta2",
    "Community": "v1beta1",
    "IPAddressPool": "v1beta1",
    "L2Advertisement": "v1beta1",
}
LABEL_OF_CONTROLLER = "control/metallb-controller"
"""Not that of Fairlead's controller, which may run beside it."""
ADDRESS_ANNOTATION = "metallb.universe.tf/loadBalancerIPs"
MEMBERLIST_PORT = "7946"
SERVED_WITHIN_S = 20.0


def find() -> None:
    """Raise Refused if the programs were not built."""
    for name in ("controller", "speaker"):
        try:
            find_program(name)
        except Refused as error:
            raise Refused(str(error), fix="run: sh tools/build.sh metallb") from error


class Metallb:
    """MetalLB in one lab."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._nodes = [host.name for host in site.topology.of("node")]

    async def install(self, pool: Sequence[str]) -> None:
        """Create all objects, then start the controller and the speakers."""
        await self.install_controller("l2", pool)
        async with self._site.client() as client:
            for node in self._nodes:
                await self._create_pod(client, node)
        await self._site.apply([_object("L2Advertisement", "l2", {"ipAddressPools": ["l2"]})])
        for node in self._nodes:
            self.start_speaker(node)

    async def install_controller(self, name: str, pool: Sequence[str]) -> None:
        """Create a pool of this name, and start the controller, which assigns its addresses."""
        async with self._site.client() as client:
            await self._site.apply([_crd(kind, version) for kind, version in KINDS.items()])
            meta = {"name": NAMESPACE}
            await self._site.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": meta}])
            await _until_served(client)
        await self._site.apply([_object("IPAddressPool", name, {"addresses": list(pool)})])
        self.start_controller()

    def start_controller(self) -> Process:
        """Start the controller."""
        return self._spawn("control", "controller", {}, ["--webhook-mode=disabled"])

    def controller(self) -> Process:
        """Return the controller. Raise Conflict if it does not run."""
        return process.one(self._site.name, LABEL_OF_CONTROLLER)

    def start_speaker(self, node: str) -> Process:
        """Start the speaker of a node."""
        key = self._site.directory.path / "metallb"
        key.mkdir(exist_ok=True)
        (key / "secretkey").write_text("bench" * 25)
        address = self._site.topology.host(node).addresses[0]
        settings = {
            "METALLB_NODE_NAME": node,
            "METALLB_HOST": address,
            "METALLB_ML_BIND_ADDR": address,
            "METALLB_ML_BIND_PORT": MEMBERLIST_PORT,
            "METALLB_ML_LABELS": LABEL,
            "METALLB_ML_SECRET_KEY_PATH": str(key),
        }
        return self._spawn(node, "speaker", settings, [])

    def speaker(self, node: str) -> Process:
        """Return the speaker of a node. Raise Conflict if it does not run."""
        return process.one(self._site.name, f"{node}/metallb-speaker")

    def _spawn(
        self, host: str, program: str, settings: Mapping[str, str], options: Sequence[str]
    ) -> Process:
        settings = {
            **settings,
            "KUBECONFIG": str(self._site.directory.kubeconfig_inside),
            "METALLB_NAMESPACE": NAMESPACE,
        }
        variables = [f"{name}={value}" for name, value in settings.items()]
        argv = ["env", *variables, str(find_program(program)), *options]
        return self._site.spawn(host, argv, label=f"{host}/metallb-{program}")

    async def _create_pod(self, client: Client, node: str) -> None:
        address = self._site.topology.host(node).addresses[0]
        key, value = LABEL.split("=")
        name = f"speaker-{node}"
        await client.create(
            PODS,
            {
                "metadata": {"name": name, "namespace": NAMESPACE, "labels": {key: value}},
                "spec": {
                    # Not a node of the lab, so that no kubelet runs it.
                    "nodeName": f"none-{node}",
                    "hostNetwork": True,
                    "containers": [{"name": "speaker", "image": "none"}],
                },
            },
            namespace=NAMESPACE,
        )
        status = {
            "phase": "Running",
            "hostIP": address,
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        await client.patch(PODS, (NAMESPACE, name), {"status": status}, subresource="status")


async def _until_served(client: Client) -> None:
    """Wait until the API server serves all kinds, which takes it a moment."""
    async with asyncio.timeout(SERVED_WITHIN_S):
        for kind, version in KINDS.items():
            while True:
                try:
                    await client.request("GET", f"/apis/{GROUP}/{version}/{_plural(kind)}")
                    break
                except (NotFound, Unavailable):
                    await asyncio.sleep(process.POLL_S)


def _plural(kind: str) -> str:
    return "communities" if kind == "Community" else f"{kind.lower()}s"


def _crd(kind: str, version: str) -> Mapping[str, Any]:
    plural = _plural(kind)
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"kind": kind, "listKind": f"{kind}List", "plural": plural},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": anything},
                }
            ],
        },
    }


def _object(kind: str, name: str, spec: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "apiVersion": f"{GROUP}/{KINDS[kind]}",
        "kind": kind,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": spec,
    }
