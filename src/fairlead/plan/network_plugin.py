"""Nodes whose network plugin is OVN-Kubernetes, and what does not fit together there.

In: a Node. Out: whether OVN-Kubernetes serves Services on it; Findings. OVN-Kubernetes is the
service proxy of its nodes: it turns every address in `status.loadBalancer` and `spec.externalIPs`
into load balancers of OVN on each node, and answers the health check node ports. In its shared
gateway mode, the external bridge of a node (`br-ex`) hands packets from the network for these
addresses and ports to OVN, so neither the packet rules of the host nor a program at the bridge
sees them; in every mode it passes ARP and neighbor solicitations for them to the host. Pure.
Follows OVN-Kubernetes: docs/features/cluster-ingress/external-ip-and-loadbalancer-ingress.md,
go-controller/pkg/util/node_annotations.go, go-controller/pkg/node/gateway_shared_intf.go."""

from fairlead.kube.objects import Node
from fairlead.model import Finding

CHASSIS_ID = "k8s.ovn.org/node-chassis-id"
"""The annotation that OVN-Kubernetes writes on each Node with a gateway of its own."""
TWO_SERVICE_PROXIES = "TwoServiceProxies"
"""Code of a Finding: a node has two service proxies."""
GATEWAY_ON_OVN_KUBERNETES = "GatewayOnOvnKubernetes"
"""Code of a Finding: gateways run on nodes that serve load-balancer addresses themselves."""
_EVIDENCE = f"annotation {CHASSIS_ID} of the Node"


def is_ovn_kubernetes(node: Node) -> bool:
    """Return whether OVN-Kubernetes serves Services on the node."""
    return CHASSIS_ID in node.metadata.annotations


def two_service_proxies() -> Finding:
    return Finding(
        TWO_SERVICE_PROXIES,
        "OVN-Kubernetes serves load-balancer addresses on the nodes, and `fairlead node` is "
        "configured as service proxy, too: both listen on the same health check node ports, and in "
        "the shared gateway mode packets from the network do not reach the rules of this role",
        evidence=_EVIDENCE,
        remedy="set node.serviceProxy to false",
    )


def gateway_on_ovn_kubernetes() -> Finding:
    return Finding(
        GATEWAY_ON_OVN_KUBERNETES,
        "gateways run on nodes of OVN-Kubernetes: in its shared gateway mode, the external bridge "
        "hands packets for load-balancer addresses to OVN, so a gateway at the bridge does not get "
        "them, and OVN-Kubernetes serves them instead",
        evidence=_EVIDENCE,
        remedy="use class fairlead.io/announce, or run the gateways outside of the cluster",
    )
