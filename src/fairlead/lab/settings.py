"""Render the files of the programs that run in a lab: Fairlead's configuration and the kubeconfigs.

In: a lab's name, size and addresses. Out: the contents of the files. Formats: fairlead.yaml
(`config`), kubeconfig v1.
"""

from base64 import b64encode
from ipaddress import ip_network
from typing import Any

import yaml

from fairlead.kube.access import Access
from fairlead.kube.objects import CONFIGURATION, CONFIGURATION_FILE
from fairlead.lab.rundir import Size
from fairlead.lab.topology import PODS, Topology

PEER_PORT = 9445
L2_SIZES = {"tableMemoryMiB": 8, "connectionEntries": 32768, "datagramEntries": 16384}
"""The sizes of a gateway's maps where it runs on every node, as the chart sets them."""


def configuration(pin_path: str, size: Size, topology: Topology) -> str:
    """Return fairlead.yaml for every role of the lab. The pin path of a gateway is set by an
    option."""
    transport = size.transport
    gateways = [address for host in topology.gateways for address in host.addresses]
    peers = [f"{host.addresses[0]}:{PEER_PORT}" for host in topology.gateways]
    gateway: dict[str, object] = {"interfaces": ["eth0"], "pinPath": pin_path}
    gateway |= {"attach": transport.attach, "forwarding": transport.forwarding}
    if size.announce == "l2":
        gateway |= {**L2_SIZES, "peers": "auto"}
    if transport.peers:
        gateway |= {"peerListen": f"*:{PEER_PORT}", "peers": peers}
    return _text(
        {
            "defaultClass": "fairlead.io/direct",
            "cluster": {"podCIDRs": [str(network) for network in PODS]},
            "pools": [{"name": "lab", "addresses": list(topology.pool)}],
            "controller": {"leaseDurationS": 3, "leaseNamespace": CONFIGURATION.namespace},
            "presence": {"leaseDurationS": 6},
            "gateway": gateway,
            **({"announce": {"l2": {}}} if size.announce == "l2" else {}),
            "tunnel": {
                "kind": transport.tunnel,
                "gateways": [str(ip_network(each)) for each in gateways],
            },
        }
    )


def config_map(configuration: str) -> dict[str, Any]:
    """Return the ConfigMap that holds fairlead.yaml in a cluster, as the Helm chart creates it."""
    metadata = {"name": CONFIGURATION.name, "namespace": CONFIGURATION.namespace}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {CONFIGURATION_FILE: configuration},
    }


def kubeconfig(lab: str, access: Access) -> str:
    """Return a kubeconfig with one context, named after the lab."""
    name = f"fairlead-{lab}"
    cluster = {"server": access.server}
    if access.authority_pem:
        cluster["certificate-authority-data"] = b64encode(access.authority_pem.encode()).decode()
    if access.server_name:
        cluster["tls-server-name"] = access.server_name
    return _text(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": cluster}],
            "users": [{"name": name, "user": {"token": access.token} if access.token else {}}],
            "contexts": [
                {"name": name, "context": {"cluster": name, "user": name, "namespace": "default"}}
            ],
            "current-context": name,
        }
    )


def _text(value: object) -> str:
    return str(yaml.safe_dump(value, sort_keys=False))
