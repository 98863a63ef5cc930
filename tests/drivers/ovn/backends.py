"""Backends for load balancers of OVN besides the pods of a site: nodes with node ports, and one
hundred pods.

In: a site. Out: addresses in the namespaces of its pods, where the server of each pod answers and
reports the address. A node port is served by the real driver of `fairlead node`, in a process of
its own."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from tests.drivers.ovn.traffic import until_answered

from fairlead.lab import namespace
from fairlead.lab.ovn.layout import OvnPod
from fairlead.lab.ovn.site import POD_PORT, OvnSite
from fairlead.net.link import Rtnetlink

NODE_PORT = 30080
_SERVICE = {
    "metadata": {"name": "web", "namespace": "default"},
    "spec": {
        "type": "NodePort",
        "clusterIP": "10.96.0.9",
        "clusterIPs": ["10.96.0.9"],
        "ports": [{"port": 80, "protocol": "TCP", "nodePort": NODE_PORT}],
        "externalTrafficPolicy": "Local",
    },
}


@asynccontextmanager
async def node_port(site: OvnSite, node: OvnPod, addresses: Sequence[str]) -> AsyncIterator[None]:
    """Make the namespace of this pod a node with pods at these addresses, and with a node port that
    leads to them."""
    slice_ = {
        "metadata": {
            "name": "web-1",
            "namespace": "default",
            "labels": {"kubernetes.io/service-name": "web"},
        },
        "addressType": "IPv4",
        "ports": [{"port": POD_PORT, "protocol": "TCP"}],
        "endpoints": [
            {"addresses": [each], "conditions": {"ready": True}, "nodeName": "node"}
            for each in addresses
        ],
    }
    settings = {
        "node_addresses": [node.address],
        "pod_cidrs": ["10.246.0.0/16"],
        "service_cidrs": ["10.96.0.0/16"],
    }
    await _add_addresses(site, node, "lo", addresses)
    objects = {"services": {"web": _SERVICE}, "slices": {"web-1": slice_}}
    proxy = _start_proxy(site.namespace(node.name), settings, objects)
    try:
        (caller, *_) = (pod for pod in site.pods if pod != node)
        await until_answered(site.namespace(caller.name), node.address, NODE_PORT)
        yield
    finally:
        proxy.kill()
        proxy.communicate()


def _start_proxy(inside: str, *inputs: object) -> "subprocess.Popen[str]":
    with namespace.inside(inside):
        started = subprocess.Popen(
            [sys.executable, "-m", "tests.drivers.nodeproxy.process"],
            stdin=subprocess.PIPE,
            text=True,
        )
    assert started.stdin is not None
    for each in inputs:
        started.stdin.write(json.dumps(each) + "\n")
    started.stdin.flush()
    return started


@asynccontextmanager
async def many_pods(site: OvnSite, each: int) -> AsyncIterator[Sequence[str]]:
    """Give the port of each pod of the site so many further addresses, and yield all of them."""
    found: dict[OvnPod, Sequence[str]] = {
        pod: [f"10.244.{100 + number}.{index + 1}" for index in range(each)]
        for number, pod in enumerate(site.pods)
    }
    async with AsyncExitStack() as stack:
        for pod, addresses in found.items():
            await _add_addresses(site, pod, "eth0", addresses)
        stack.push_async_callback(_set_addresses, site, dict.fromkeys(found, ()))
        await _set_addresses(site, found)
        yield [address for addresses in found.values() for address in addresses]


async def _add_addresses(site: OvnSite, pod: OvnPod, device: str, addresses: Sequence[str]) -> None:
    with namespace.inside(site.namespace(pod.name)):
        links = Rtnetlink()
    async with links:
        await links.set_state(device, up=True)
        for each in addresses:
            await links.set_address(device, f"{each}/32")


async def _set_addresses(site: OvnSite, found: Mapping[OvnPod, Sequence[str]]) -> None:
    """Tell OVN the addresses of ports, so that its router knows their MAC addresses."""
    words: list[str] = []
    for pod, addresses in found.items():
        listed = " ".join((pod.mac, pod.address, pod.address_v6, *addresses))
        words += [*(["--"] if words else []), "lsp-set-addresses", pod.name, listed]
    await site.central.control("nb", *words)
    await site.central.synchronize()
