"""How the lists and maps of each kind merge: by which keys, as a set, or as one value.

A table, used by strategic merge patches and by server-side apply, and told to clients in the
OpenAPI documents. Only what differs from the rule is written down; the rule is that a map merges
field by field and a list is one value. Sources: the `patchStrategy`, `patchMergeKey`, `listType`,
`listMapKey` and `mapType` markers of the Kubernetes API types."""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from fairlead.lab.apiserver.kinds import Kind

Form = Literal["fields", "map", "value", "keyed", "set"]
"""`fields`: an object, merged by field. `map`: the same, of any names. `value`: taken or left as a
whole. `keyed`: a list of maps, told apart by their `keys`. `set`: a list of plain values, of which
each is there or not."""


class Shape(msgspec.Struct, frozen=True, eq=False):
    """How one field merges, and those below it. `defaults` stand in for keys that an item leaves
    out."""

    form: Form = "fields"
    keys: tuple[str, ...] = ()
    defaults: Mapping[str, str] = {}
    patch_key: str = ""
    """The one key by which a strategic merge patch tells items apart. It knows no second one: two
    items that differ only in their protocol are one to it (kubernetes/kubernetes#105610), and are
    two to server-side apply."""
    patch_strategy: str = ""
    """What a client that makes a strategic merge patch is told: `merge`, or `merge,retainKeys`
    where an item's fields exclude each other (the sources of a volume), so that those that are not
    named must go."""
    fields: Mapping[str, "Shape"] = {}

    def below(self, name: str) -> "Shape":
        return self.fields.get(name, RULE)


RULE: Final = Shape()
VALUE: Final = Shape("value")
MAP: Final = Shape("map")
SET: Final = Shape("set", patch_strategy="merge")


def keyed(
    *keys: str,
    fields: Mapping[str, Shape] = {},
    defaults: Mapping[str, str] = {},
    patch_strategy: str = "merge",
) -> Shape:
    return Shape("keyed", keys, defaults, keys[0], patch_strategy, fields)


METADATA: Final = Shape(
    fields={
        "labels": MAP,
        "annotations": MAP,
        "finalizers": SET,
        "ownerReferences": keyed("uid", fields={"uid": VALUE}),
    }
)
_CONDITIONS: Final = keyed("type")
_TCP: Final = {"protocol": "TCP"}

_CONTAINERS: Final = keyed(
    "name",
    fields={
        "ports": keyed("containerPort", "protocol", defaults=_TCP),
        "env": keyed("name"),
        "volumeMounts": keyed("mountPath"),
        "volumeDevices": keyed("devicePath"),
    },
)

_SERVICE: Final = Shape(
    fields={
        "metadata": METADATA,
        "spec": Shape(
            fields={
                "ports": keyed("port", "protocol", defaults=_TCP),
                "selector": VALUE,
                "sessionAffinityConfig": Shape("map", fields={"clientIP": MAP}),
            }
        ),
        "status": Shape(fields={"conditions": _CONDITIONS}),
    }
)
_POD: Final = Shape(
    fields={
        "metadata": METADATA,
        "spec": Shape(
            fields={
                "containers": _CONTAINERS,
                "initContainers": _CONTAINERS,
                "ephemeralContainers": _CONTAINERS,
                "volumes": keyed("name", patch_strategy="merge,retainKeys"),
                "resourceClaims": keyed("name", patch_strategy="merge,retainKeys"),
                "imagePullSecrets": keyed("name"),
                "hostAliases": keyed("ip"),
                "topologySpreadConstraints": keyed("topologyKey", "whenUnsatisfiable"),
                "schedulingGates": keyed("name"),
                "nodeSelector": VALUE,
            }
        ),
        "status": Shape(
            fields={
                "conditions": _CONDITIONS,
                "podIPs": keyed("ip"),
                "resourceClaimStatuses": keyed("name", patch_strategy="merge,retainKeys"),
            }
        ),
    }
)
_NODE: Final = Shape(
    fields={
        "metadata": METADATA,
        "spec": Shape(fields={"podCIDRs": SET}),
        "status": Shape(
            fields={
                "conditions": _CONDITIONS,
                "addresses": keyed("type"),
                "capacity": MAP,
                "allocatable": MAP,
            }
        ),
    }
)
_NAMESPACE: Final = Shape(
    fields={"metadata": METADATA, "status": Shape(fields={"conditions": _CONDITIONS})}
)
_REST: Final = Shape(fields={"metadata": METADATA})

_SHAPES: Final = {"Service": _SERVICE, "Pod": _POD, "Node": _NODE, "Namespace": _NAMESPACE}


def shape_of(kind: Kind) -> Shape:
    if kind.custom is not None:
        shape: Shape = kind.custom.shape
        return shape
    return _SHAPES.get(kind.kind, _REST)
