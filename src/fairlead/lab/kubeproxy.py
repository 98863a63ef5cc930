"""Run a real kube-proxy, by default in nftables mode, on a node of a lab where `fairlead node` does
not run.

In: a lab that is up, and a node whose own service proxy has been stopped and cleaned up. Out: a
process that is the node's service proxy, with its health port, until it is stopped or the lab goes
down. Invariant: when `start` returns, the rules cover what the API server served at that time.
kube-proxy has all rights: its RBAC is not under test. Follows KubeProxyConfiguration v1alpha1.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from fairlead.lab import process
from fairlead.lab.kubeapiserver import find_program
from fairlead.lab.process import Process
from fairlead.lab.topology import PODS

if TYPE_CHECKING:
    from fairlead.lab.site import Site

HEALTH_PORT = 10256
MODE = "nftables"
IPTABLES = ("/usr/sbin/iptables", "/usr/sbin/ip6tables")


async def start(site: "Site", node: str, fields: Mapping[str, object] | None = None) -> Process:
    """Start kube-proxy and return once it has created its rules.

    `fields` override fields of the lab's configuration. Raise Refused when the program is missing,
    and Unavailable when kube-proxy fails.
    """
    label = f"{node}/kube-proxy"
    path = site.directory.path / f"kube-proxy-{node}.yaml"
    path.write_text(
        yaml.safe_dump({**configuration(node, site.directory.kubeconfig_inside), **(fields or {})})
    )
    started = site.spawn(
        node, [str(find_program("kube-proxy")), "--config", str(path)], label=label
    )
    mode = str((fields or {}).get("mode", MODE))
    await process.await_ready(
        started, partial(_has_made_rules, site, node, mode), log=site.directory.log(label)
    )
    return started


def configuration(node: str, kubeconfig: Path) -> Mapping[str, object]:
    """Return the lab's KubeProxyConfiguration for a node."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": MODE,
        # The lab's embedded API server does not serve protobuf to informers.
        "clientConnection": {"kubeconfig": str(kubeconfig), "contentType": "application/json"},
        "hostnameOverride": node,
        "detectLocalMode": "ClusterCIDR",
        "clusterCIDR": ",".join(map(str, PODS)),
        "healthzBindAddress": f"[::]:{HEALTH_PORT}",
        # The size of the conntrack table cannot be set from within a network namespace.
        "conntrack": {"maxPerCore": 0, "min": 0},
        "nftables": {"minSyncPeriod": "100ms", "syncPeriod": "30s"},
        "iptables": {"minSyncPeriod": "100ms", "syncPeriod": "30s"},
    }


async def _has_made_rules(site: "Site", node: str, mode: str) -> bool:
    """Return whether kube-proxy's tables or chains exist. They are created with the first rules;
    its health port reports healthy before."""
    shown: list[tuple[str, ...]] = [
        ("nft", "list", "table", family, "kube-proxy") for family in ("ip", "ip6")
    ]
    if mode == "iptables":
        shown = [(each, "-w", "-t", "nat", "-S", "KUBE-SERVICES") for each in IPTABLES]
    for command in shown:
        code, _, _ = await site.exec(node, command)
        if code:
            return False
    return True
