"""The terms of class `fairlead.io/ovn`: logical routers of OVN send to pods, or to node ports.

In: a Service. Out: `Terms`. The class serves every port of every protocol. Packets keep the address
of the client. Source ranges are refused, because ignoring them would admit every client. Pure."""

from collections.abc import Mapping, Sequence

from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.kube.objects import ServicePort
from fairlead.model import Finding, Listener, OvnSettings
from fairlead.plan import direct
from fairlead.plan.annotations import drain_timeout_s
from fairlead.plan.service import affinity_timeout_s, source_ranges
from fairlead.plan.terms import ServiceContext, Terms, without_node_port

OVN = "fairlead.io/ovn"

PODS_WITHOUT_NODE = "OvnPodsWithoutNode"
"""Code of a Finding: no EndpointSlice names the node of a pod, so no gateway router sends to it."""

AFFINITY = Finding(
    "OvnAffinityByNode",
    "spec.sessionAffinity keeps a client at one pod of a node, and the routers in front of the "
    "nodes choose a node for each connection",
    severity="info",
    remedy="have these routers hash by the address of the client alone",
)

_READY = "pods get traffic while they are ready according to the Kubernetes API"

SUBSTITUTES: Mapping[str, str] = {
    **direct.SUBSTITUTES,
    "enable-health-monitor": _READY,
    "health-monitor-delay": _READY,
    "health-monitor-timeout": _READY,
    "health-monitor-max-retries": _READY,
    "health-monitor-max-retries-down": _READY,
    "members": "pods, or node ports with ready pods, are members",
}
"""By short name of each annotation without effect, what class ovn does instead."""


def configured(config: Config) -> Refused | None:
    """Return why the class is unavailable: no OVN is configured."""
    if config.ovn is not None:
        return None
    return Refused(
        f"class {OVN} is not configured",
        fix="configure the northbound database in section `ovn` of the configuration",
    )


def ovn_terms(context: ServiceContext) -> Terms:
    """Return the terms of class ovn. Raise Refused if it is not configured, or if the Service has
    source ranges."""
    section = context.config.ovn
    if section is None:
        raise configured(context.config) or Refused(f"class {OVN} is not configured")
    if source_ranges(context.service):
        raise Refused(
            f"class {OVN} admits every client, so spec.loadBalancerSourceRanges cannot be followed",
            fix="remove them and restrict clients by a NetworkPolicy, or use class "
            f"{direct.DIRECT}",
        )
    timeout_s = drain_timeout_s(context.service.metadata.annotations) or section.drain_timeout_s
    settings = OvnSettings(section.backends, timeout_s)
    if section.topology == "gateways":
        affinity = [AFFINITY] if affinity_timeout_s(context.service) else []
        return Terms(settings, notes=affinity, pods=True, remarks=_without_node)
    if section.backends == "pods":
        return Terms(settings, pods=True)
    missing: list[ServicePort] = [each for each in context.service.spec.ports if not each.node_port]
    unserved, notes = without_node_port(OVN, missing)
    return Terms(settings, notes=notes, unserved=unserved)


def _without_node(listeners: Sequence[Listener]) -> Sequence[Finding]:
    """Return the Finding about pods that are on the gateway router of no node."""
    if all(pod.node for listener in listeners for pod in listener.pods):
        return ()
    return [
        Finding(
            PODS_WITHOUT_NODE,
            "pods whose EndpointSlice names no node get no connections, because each gateway "
            "router sends to the pods of its node",
            severity="error",
            remedy="set nodeName in the EndpointSlice, or use topology `router`",
        )
    ]
