"""How the lists and maps of each kind merge: by keys, as a set, or as one value.

A table, used by strategic merge patches and server-side apply, and published in the OpenAPI
documents. Only exceptions are listed; by default a map merges field by field and a list is one
value. Sources: the `patchStrategy`, `patchMergeKey`, `listType`, `listMapKey` and `mapType` markers
of the Kubernetes API types.
"""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from fairlead.lab.apiserver.kinds import Kind

Form = Literal["fields", "map", "value", "keyed", "set"]
"""`fields`: an object, merged by field. `map`: the same, with arbitrary names. `value`: replaced as
a whole. `keyed`: a list of maps, identified by their `keys`. `set`: a list of plain values, each of
which is present or absent."""


class Shape(msgspec.Struct, frozen=True, eq=False):
    """How a field and the fields below it merge. `defaults` are the values of keys that an item
    omits."""

    form: Form = "fields"
    keys: tuple[str, ...] = ()
    defaults: Mapping[str, str] = {}
    patch_key: str = ""
    """The only key by which a strategic merge patch identifies items. Two items that differ only in
    their protocol are one item to it (kubernetes/kubernetes#105610), but two to server-side apply.
    """
    patch_strategy: str = ""
    """The strategy that clients of strategic merge patches learn from OpenAPI: `merge`, or
    `merge,retainKeys` where the fields of an item exclude each other (the sources of a volume), so
    that fields that the patch does not name are removed."""
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
