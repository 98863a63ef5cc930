"""Decisions and reports of the lab's kubelets and scheduler, as values. Pure.

In: Pods and Nodes from the API, and the time as text. Out: bodies of API calls, and the node of a
new Pod. Follows the API reference of core/v1 (PodStatus, NodeStatus) and the well-known labels of
Kubernetes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from fairlead.lab.objects import READY_ANNOTATION, Node, Pod
from fairlead.lab.topology import Host

VERSION = "v1.32.0"
HOSTNAME_LABEL = "kubernetes.io/hostname"

Json = dict[str, object]


def choose_node(
    pod: Pod, nodes: Iterable[Node], load: Iterable[str], alive: frozenset[str]
) -> str | None:
    """Return the node for a Pod: of the nodes that may run it, the one with the fewest Pods. None
    if no node may run it at present.

    `load` holds the node of each assigned Pod, one entry per Pod; `alive` holds the nodes that are
    on.
    """
    wanted = pod.spec.node_selector.items()
    fit = [
        node.metadata.name
        for node in nodes
        if node.metadata.name in alive
        and not node.spec.unschedulable
        and wanted <= node.metadata.labels.items()
    ]
    count = Counter(load)
    return min(fit, key=lambda name: (count[name], len(name), name), default=None)


def probe_succeeds(pod: Pod) -> bool:
    """Return whether the Pod's readiness probe succeeds."""
    return pod.metadata.annotations.get(READY_ANNOTATION) != "false"


def grace_s(pod: Pod) -> int:
    """Return the Pod's grace period: that of the deletion, else that of its spec, else 30 s."""
    grace_s = pod.metadata.deletion_grace_period_seconds
    if grace_s is None:
        grace_s = pod.spec.termination_grace_period_seconds
    return 30 if grace_s is None else grace_s


def running_status(
    pod: Pod,
    host: Host,
    addresses: tuple[str, str],
    *,
    ready: bool,
    restarts: int,
    now: str,
    started: str,
) -> Json:
    """Return the status of a Pod whose server runs. `ready` is False while the Pod must not get
    traffic."""
    containers = [
        {
            "name": container.name,
            "image": container.image,
            "imageID": container.image,
            "containerID": f"lab://{pod.metadata.uid}/{container.name}/{restarts}",
            "ready": ready,
            "started": True,
            "restartCount": restarts,
            "state": {"running": {"startedAt": started}},
        }
        for container in pod.spec.containers
    ]
    return {
        "phase": "Running",
        "hostIP": host.addresses[0],
        "hostIPs": [{"ip": address} for address in host.addresses],
        "podIP": addresses[0],
        "podIPs": [{"ip": address} for address in addresses],
        "startTime": started,
        "conditions": _conditions(pod, ready, now),
        "containerStatuses": containers,
        "qosClass": "BestEffort",
    }


def unreachable(pod: Pod, now: str) -> list[Json]:
    """Return the conditions of a Pod whose node does not report, or has lost its sandbox."""
    return _conditions(pod, False, now)


def _conditions(pod: Pod, ready: bool, now: str) -> list[Json]:
    before = {condition.type: condition for condition in pod.status.conditions}
    conditions: list[Json] = []
    for kind, value in {
        "PodScheduled": True,
        "Initialized": True,
        "ContainersReady": ready,
        "Ready": ready,
    }.items():
        status = str(value)
        old = before.get(kind)
        since = old.last_transition_time if old is not None and old.status == status else now
        conditions.append({"type": kind, "status": status, "lastTransitionTime": since or now})
    return conditions


def node_object(host: Host, lab: str) -> Json:
    """Return the Node that a kubelet registers, without status."""
    labels = {HOSTNAME_LABEL: host.name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    spec = {
        "podCIDR": host.pod_cidrs[0],
        "podCIDRs": list(host.pod_cidrs),
        "providerID": f"lab://{lab}/{host.name}",
    }
    return {"metadata": {"name": host.name, "labels": labels}, "spec": spec}


def node_status(host: Host, *, ready: bool, now: str) -> Json:
    """Return the status of a node: its addresses, and whether its kubelet still reports."""
    addresses = [{"type": "InternalIP", "address": address} for address in host.addresses]
    condition = {
        "type": "Ready",
        "status": "True" if ready else "Unknown",
        "reason": "KubeletReady" if ready else "NodeStatusUnknown",
        "message": "kubelet is posting ready status"
        if ready
        else "Kubelet stopped posting node status.",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }
    size: Mapping[str, str] = {"cpu": "2", "memory": "4Gi", "pods": "250"}
    return {
        "addresses": [*addresses, {"type": "Hostname", "address": host.name}],
        "capacity": size,
        "allocatable": size,
        "conditions": [condition],
        "nodeInfo": {
            "kubeletVersion": VERSION,
            "kubeProxyVersion": VERSION,
            "operatingSystem": "linux",
            "architecture": "amd64",
            "osImage": "Fairlead lab",
            "kernelVersion": "",
            "containerRuntimeVersion": "lab://1",
            "machineID": host.mac,
            "systemUUID": host.mac,
            "bootID": host.mac,
        },
    }
