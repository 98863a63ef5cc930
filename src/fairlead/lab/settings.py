"""Render the files of the programs that run in a lab: Fairlead's configuration and the kubeconfigs.

In: a lab's name, size and addresses. Out: the contents of the files. Formats: fairlead.yaml
(`config`), kubeconfig v1.
"""

from base64 import b64encode
from pathlib import Path
from typing import Any

import yaml

from fairlead.kube.access import Access
from fairlead.kube.objects import CONFIGURATION, CONFIGURATION_FILE
from fairlead.lab.ovn.edge import DRAIN_ADDRESS, remote
from fairlead.lab.ovn.routers import EDGE, router_name
from fairlead.lab.routers import (
    BFD_MULTIPLIER,
    HOLD_S,
    HOST_ASN,
    KEEPALIVE_S,
    PEERS,
    ROUTER_ADDRESSES,
    ROUTER_ASN,
    Routing,
)
from fairlead.lab.rundir import Ovn, RunDirectory, Size
from fairlead.lab.topology import PODS, Topology
from fairlead.sections import NODE_PLACEHOLDER

PEER_PORT = 9445


def configuration(
    pin_path: str, size: Size, topology: Topology, *, bird: Path | None = None
) -> str:
    """Return fairlead.yaml for every role of the lab. The pin path of a gateway is set by an
    option. `bird` is the directory of BIRD on one host; None: the default, for hosts without
    BIRD."""
    transport = size.transport
    gateways = [address for host in topology.gateways for address in host.addresses]
    peers = [f"{host.addresses[0]}:{PEER_PORT}" for host in topology.gateways]
    devices = dict.fromkeys(port.device for host in topology.gateways for port in host.ports)
    gateway: dict[str, object] = {"interfaces": list(devices) or ["eth0"], "pinPath": pin_path}
    gateway |= {"attach": transport.attach, "forwarding": transport.forwarding}
    if size.gateways_on_nodes and size.announce != "none":
        gateway["peers"] = "auto"
    elif transport.peers:
        gateway |= {"peerListen": f"*:{PEER_PORT}", "peers": peers}
    announce = announcement(size, bird)
    return _text(
        {
            "defaultClass": f"fairlead.io/{size.default_class}",
            "cluster": {"podCIDRs": [str(network) for network in PODS]},
            "pools": [
                {"name": name, "addresses": list(addresses), "autoAssign": place == 0}
                for place, (name, addresses) in enumerate(topology.pools.items())
            ],
            **({"announce": announce} if announce else {}),
            "controller": {
                **({"leaseDurationS": 3} if size.short_leases else {}),
                "leaseNamespace": CONFIGURATION.namespace,
            },
            **({"presence": {"leaseDurationS": 6}} if size.short_leases else {}),
            "gateway": gateway,
            "tunnel": {"kind": transport.tunnel, "gateways": gateways},
            **({"node": node(size)} if size.default_class == "announce" else {}),
            **({"ovn": ovn(size.ovn, RunDirectory(topology.lab))} if size.ovn else {}),
        }
    )


def ovn(wanted: Ovn, directory: RunDirectory) -> dict[str, object]:
    """Return the section `ovn`."""
    common: dict[str, object] = {
        "northbound": [remote(directory, "nb")],
        "southbound": [remote(directory, "sb")],
        "clusterId": directory.lab,
        "topology": wanted.topology,
    }
    if wanted.topology == "gateways":
        return common | {"routers": router_name(NODE_PLACEHOLDER)}
    return common | {
        "router": EDGE,
        "backends": wanted.backends,
        # Its default is the address of the lab's router.
        "drainAddress": DRAIN_ADDRESS,
    }


def node(size: Size) -> dict[str, object]:
    """Return the section `node` of nodes that announce addresses."""
    return {"announce": True, "serviceProxy": size.node_proxy == "fairlead"}


def announcement(size: Size, bird: Path | None = None) -> dict[str, object]:
    """Return the section `announce`; empty if no host announces addresses."""
    if size.announce == "none":
        return {}
    # Also without sessions: roles of this configuration remove what is left in the directory.
    directory = {"directory": str(bird)} if bird is not None else {}
    if size.announce == "l2":
        return {"method": "l2"} | ({"bgp": directory} if directory else {})
    peers = [
        _peer(name, address, family, size.routing)
        for name, address, family in zip(PEERS, ROUTER_ADDRESSES, ("IPv4", "IPv6"), strict=True)
    ]
    return {"method": "bgp", "bgp": {"asn": HOST_ASN, "peers": peers, **directory}}


def _peer(name: str, address: str, family: str, routing: Routing) -> dict[str, object]:
    peer: dict[str, object] = {"name": name, "address": address, "asn": ROUTER_ASN}
    peer |= {"families": [family], "holdTimeS": HOLD_S, "keepaliveTimeS": KEEPALIVE_S}
    if routing.bfd_interval_ms:
        peer["bfd"] = {"intervalMs": routing.bfd_interval_ms, "multiplier": BFD_MULTIPLIER}
    return peer


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
