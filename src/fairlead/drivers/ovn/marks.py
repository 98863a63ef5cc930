"""The marks by which Fairlead recognizes its own rows in a database of OVN: keys of `external_ids`,
never names.

In: a cluster, a Service. Out: the marks and the name of a row; from marks the Service, and the
deadlines that a row carries. Pure. Other programs may add keys to a row (the Octavia provider of
OVN does); keys without the prefix are neither compared nor changed. Deadlines are Unix times in
whole seconds, because another process, perhaps on another host, continues after a restart."""

from collections.abc import Mapping

from fairlead.model import ServiceKey

PREFIX = "fairlead.io/"
CLUSTER = "fairlead.io/cluster"
SERVICE = "fairlead.io/service"
PORT = "fairlead.io/port"
VIP = "fairlead.io/vip"
"""The key of column `vips` that is the address of the Service. The other key is for draining."""
NODE = "fairlead.io/node"
"""The node whose pods the row has; absent: the row has the backends of all nodes."""
DRAINS = "fairlead.io/drains"
"""Backends that are in no EndpointSlice any more, each with the time at which its connections end:
`10.244.1.10:8080=1764201600,...`."""
REMOVED = "fairlead.io/removed"
"""The time at which the row of a Service that is gone is deleted."""
_MAX_DIGITS = 12
"""Another program may write a time of any length, and no float holds the longest ones."""


def marks_of(
    cluster: str, service: ServiceKey, port: int, vip: str, node: str = ""
) -> dict[str, str]:
    """Return the marks of a row for one port of the Service at one address, on one node or on all
    nodes (empty)."""
    marks = {CLUSTER: cluster, SERVICE: str(service), PORT: str(port), VIP: vip}
    return marks | {NODE: node} if node else marks


def service_of(external_ids: Mapping[str, str], cluster: str) -> ServiceKey | None:
    """Return the Service of this cluster to which a row belongs; None without such a mark."""
    key = external_ids.get(SERVICE, "")
    if external_ids.get(CLUSTER) != cluster or "/" not in key:
        return None
    return ServiceKey.parse(key)


def own(external_ids: Mapping[str, str]) -> dict[str, str]:
    """Return the keys that belong to Fairlead."""
    return {key: text for key, text in external_ids.items() if key.startswith(PREFIX)}


def drains_text(deadlines: Mapping[str, int]) -> str:
    return ",".join(f"{backend}={deadlines[backend]}" for backend in sorted(deadlines))


def drains_of(external_ids: Mapping[str, str]) -> dict[str, int]:
    """Return the deadline of each draining backend that a row carries. An entry that is not
    readable is left out, so that its backend gets a new deadline."""
    found = {}
    for entry in external_ids.get(DRAINS, "").split(","):
        backend, _, text = entry.partition("=")
        if _is_time(text):
            found[backend] = int(text)
    return found


def removed_of(external_ids: Mapping[str, str]) -> int | None:
    """Return the time at which the row is deleted; None if its Service exists. 0 if the mark is not
    readable."""
    text = external_ids.get(REMOVED)
    if text is None:
        return None
    return int(text) if _is_time(text) else 0


def due_of(external_ids: Mapping[str, str]) -> int | None:
    """Return the Unix time at which the row needs a further step; None if it needs none. A row that
    is going to be deleted needs none before."""
    removed = removed_of(external_ids)
    return removed if removed is not None else min(drains_of(external_ids).values(), default=None)


def _is_time(text: str) -> bool:
    return text.isdecimal() and len(text) <= _MAX_DIGITS
