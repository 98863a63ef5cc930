"""A real kube-proxy on a node of a lab, in nftables mode, where `fairlead node` does not run.

In: a lab that is up; a node whose own service proxy has been ended and cleaned up. Out: a process
that is that node's service proxy, with its health port, for as long as it runs or the lab is there.
Invariant: when `start` returns there are rules for what the API server showed then. It has all
rights: what kube-proxy may do is not under test. Follows KubeProxyConfiguration v1alpha1."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import yaml

from fairlead.lab import process
from fairlead.lab.kubeapiserver import find_program
from fairlead.lab.process import Process
from fairlead.lab.site import Site
from fairlead.lab.topology import PODS

HEALTH_PORT = 10256


async def start(site: Site, node: str, fields: Mapping[str, object] | None = None) -> Process:
    """Start it, and return once it has made its rules. `fields` of its configuration are put in the
    place of the lab's own. Raises Refused without the program, Unavailable if it fails."""
    label = f"{node}/kube-proxy"
    path = site.directory.path / f"kube-proxy-{node}.yaml"
    path.write_text(
        yaml.safe_dump({**configuration(node, site.directory.kubeconfig_inside), **(fields or {})})
    )
    started = site.spawn(
        node, [str(find_program("kube-proxy")), "--config", str(path)], label=label
    )
    await process.await_ready(
        started, partial(_has_made_rules, site, node), log=site.directory.log(label)
    )
    return started


def configuration(node: str, kubeconfig: Path) -> Mapping[str, object]:
    """KubeProxyConfiguration."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        # The lab's own API server speaks no protobuf to informers.
        "clientConnection": {"kubeconfig": str(kubeconfig), "contentType": "application/json"},
        "hostnameOverride": node,
        "detectLocalMode": "ClusterCIDR",
        "clusterCIDR": ",".join(map(str, PODS)),
        "healthzBindAddress": f"[::]:{HEALTH_PORT}",
        # The size of the kernel's table is no namespace's own.
        "conntrack": {"maxPerCore": 0, "min": 0},
        "nftables": {"minSyncPeriod": "100ms", "syncPeriod": "30s"},
    }


async def _has_made_rules(site: Site, node: str) -> bool:
    """Its tables come with the first rules. It calls itself healthy before."""
    for family in ("ip", "ip6"):
        code, _, _ = await site.exec(node, ["nft", "list", "table", family, "kube-proxy"])
        if code:
            return False
    return True
