"""The rights that each role of Fairlead needs in the whole cluster. Pure values.

In: the name of a role. Out: its rights, which are those of its ClusterRole in the chart."""

from collections.abc import Mapping
from typing import NamedTuple


class Right(NamedTuple):
    """A verb on a resource. `resource`: with a subresource, such as `services/status`."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f".{self.group}" if self.group else "")


def _rights(group: str, resource: str, *verbs: str) -> tuple[Right, ...]:
    return tuple(Right(group, resource, verb) for verb in verbs)


_WATCHED = (*_rights("", "services", "list", "watch"), *_rights("", "nodes", "list", "watch"))
_SLICES = _rights("discovery.k8s.io", "endpointslices", "list", "watch")
_EVENTS = _rights("", "events", "get", "create", "patch")

RIGHTS: Mapping[str, tuple[Right, ...]] = {
    "controller": (
        *_WATCHED,
        *_SLICES,
        *_rights("", "services", "get"),
        *_rights("", "namespaces", "list", "watch"),
        *_rights("fairlead.io", "addresspools", "list", "watch", "patch"),
        *_rights("fairlead.io", "addresspools/status", "patch"),
        *_rights(
            "fairlead.io", "addressgrants", "get", "list", "watch", "create", "update", "delete"
        ),
        *_rights("", "services/status", "patch"),
        *_EVENTS,
    ),
    "gateway": (*_WATCHED, *_SLICES, *_EVENTS),
    "node": (*_WATCHED, *_SLICES, *_rights("", "nodes", "get"), *_EVENTS),
}


def needed(role: str, *, service_proxy: bool) -> tuple[Right, ...]:
    """Return the rights of a role. `service_proxy`: whether a node is a service proxy; only then it
    reads EndpointSlices."""
    rights = RIGHTS.get(role, ())
    if role == "node" and not service_proxy:
        return tuple(each for each in rights if each not in _SLICES)
    return rights
