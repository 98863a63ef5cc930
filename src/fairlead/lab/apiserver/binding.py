"""How a Pod gets its node: by the subresource `binding`, once, and by nothing else.

In: the Pod and the Binding, as decoded. Out: the Pod with its node, or ApiFailure. Pure; the time
is an argument. Follows the binding storage of the API server (registry/core/pod/storage)."""

from fairlead.lab.apiserver import failure
from fairlead.lab.apiserver.failure import Object


def bound(pod: Object, binding: Object, time: str) -> Object:
    """The Pod on the node that the Binding names. Conflict if it has one, or is on its way out."""
    name = pod["metadata"]["name"]
    node = (binding.get("target") or {}).get("name")
    if not node:
        raise failure.in_words_of_storage(500, "target.name: Required value")
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
