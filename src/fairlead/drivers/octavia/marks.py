"""By what Fairlead knows its own load balancers: tags, never names.

In: a cluster, a Service. Out: tags, names and descriptions; and back from tags to the Service. Pure.
Names are not unique in Octavia, and anybody may give any. A tag with a comma in it can be set and never be found: none of ours
can have one, as Kubernetes lets no name have it. Octavia cuts nothing: 255 characters are the most for each of these texts.
"""

from collections.abc import Iterable

from fairlead.model import ServiceKey, Value

LONGEST = 255
_CLUSTER = "fairlead-cluster="
_SERVICE = "fairlead-service="
_UID = "fairlead-uid="
EXPLICIT = "fairlead-explicit="
"""On a listener, a setting that somebody asked for: without the wish it goes back to what the cloud has."""


class Owner(Value, frozen=True):
    """A cluster. `uid`: of its namespace kube-system, which no two clusters share. `name`: for people."""

    uid: str
    name: str

    @property
    def tag(self) -> str:
        """What everything of this cluster carries."""
        return _CLUSTER + self.uid

    def tags(self, service: ServiceKey, uid: str) -> tuple[str, ...]:
        """Of a load balancer."""
        return tuple(sorted((self.tag, service_tag(service), _UID + uid)))

    def load_balancer_name(self, service: ServiceKey) -> str:
        return f"fairlead_{self.name}_{service.namespace}_{service.name}"[:LONGEST]

    def description(self, service: ServiceKey) -> str:
        return f"Kubernetes Service {service} of cluster {self.name}, made by Fairlead"[:LONGEST]


def service_tag(service: ServiceKey) -> str:
    return f"{_SERVICE}{service}"


def service_of(tags: Iterable[str]) -> tuple[ServiceKey, str] | None:
    """Whose it is, with the Service's uid; None without our mark."""
    told = dict(tag.split("=", 1) for tag in tags if tag.startswith((_SERVICE, _UID)))
    key, uid = told.get(_SERVICE[:-1], ""), told.get(_UID[:-1], "")
    return (ServiceKey.parse(key), uid) if "/" in key and uid else None


def explicit_tags(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(EXPLICIT + name for name in names))
