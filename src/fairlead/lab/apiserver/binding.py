"""Bind a Pod to a node by the subresource `binding`, the only way, and only once. Pure; the time is
an argument.

In: the Pod and the Binding, decoded. Out: the Pod with its node, or ApiFailure. Follows the binding
storage of the API server (registry/core/pod/storage).
"""

from fairlead.kube.rules.causes import Object
from fairlead.lab.apiserver import failure


def bound(pod: Object, binding: Object, time: str) -> Object:
    """Return the Pod on the node that the Binding names. Raise a conflict if the Pod has a node or
    is being deleted."""
    name = pod["metadata"]["name"]
    node = (binding.get("target") or {}).get("name")
    if not node:
        raise failure.storage_error(500, "target.name: Required value")
    if pod["metadata"].get("deletionTimestamp"):
        raise failure.not_bound(name, f"pod {name} is being deleted, cannot be assigned to a host")
    if pod["spec"].get("nodeName"):
        raise failure.not_bound(
            name, f'pod {name} is already assigned to node "{pod["spec"]["nodeName"]}"'
        )
    scheduled = {
        "type": "PodScheduled",
        "status": "True",
        "lastProbeTime": None,
        "lastTransitionTime": time,
    }
    status = pod.get("status") or {}
    others = [
        condition
        for condition in status.get("conditions", [])
        if condition["type"] != "PodScheduled"
    ]
    return pod | {
        "spec": pod["spec"] | {"nodeName": node},
        "status": status | {"conditions": [*others, scheduled]},
    }
