"""The marks by which Fairlead recognizes its own load balancers: tags, never names.

In: a cluster, a Service. Out: tags, names and descriptions; and from tags back to the Service.
Pure. Names are not unique in Octavia, and any user may choose any name. A tag with a comma can be
set but not searched for; the tags of Fairlead have no comma, because Kubernetes allows none in
names. Each of these texts may have 255 characters; Octavia rejects longer ones and does not
truncate them."""

from collections.abc import Iterable

from fairlead.model import ServiceKey, Value

MAX_LENGTH = 255
ANY = "fairlead-"
"""The prefix of all tags of Fairlead."""
OCCM = "kube_service_"
"""The prefix of all tags of cloud-provider-openstack. Each tag is the name that it gives to the
load balancer of one Service."""
_CLUSTER = "fairlead-cluster="
_SERVICE = "fairlead-service="
_UID = "fairlead-uid="
_KEPT = " fairlead-keep"
SHARED_WITH = "fairlead.io/shared-with="
"""Tag of a load balancer, followed by the name of a namespace: the owner of the load balancer
allows Services of that namespace to have listeners on it. The tag is not a mark of Fairlead: the
owner sets and removes it."""
COVERS = "fairlead-covers="
"""A tag of a monitor of provider ovn: the floating IP for which the monitor checks members."""
COVERS_ALL = f"{COVERS}all"
"""The monitor checks members for every floating IP, also for one that is attached later."""
EXPLICIT = "fairlead-explicit="
"""A tag of a listener: the name of a setting that the Service sets. When the Service no longer sets
it, the cloud's default is restored."""


class Owner(Value, frozen=True):
    """A cluster. `uid`: the unique uid of its namespace kube-system. `name`: for people."""

    uid: str
    name: str

    @property
    def tag(self) -> str:
        """The tag of all objects of this cluster."""
        return _CLUSTER + self.uid

    def tags(self, service: ServiceKey, uid: str) -> tuple[str, ...]:
        """The tags of a load balancer and its parts."""
        return tuple(sorted((self.tag, service_tag(service), _UID + uid)))

    def marked_service(self, tags: Iterable[str]) -> tuple[ServiceKey, str] | None:
        """Return the Service of this cluster to which the tags belong, with its uid; None without
        such a mark."""
        tags = tuple(tags)
        return service_of(tags) if self.tag in tags else None

    def load_balancer_name(self, service: ServiceKey) -> str:
        return f"fairlead_{self.name}_{service.namespace}_{service.name}"[:MAX_LENGTH]

    def description(self, service: ServiceKey) -> str:
        return f"Kubernetes Service {service} of cluster {self.name}, made by Fairlead"[:MAX_LENGTH]

    def network_mark(self, service: ServiceKey, *, kept: bool = False) -> str:
        """Return the description of the Service's objects at Neutron, which cannot have tags when
        they are created."""
        return f"{service_tag(service)} {self.tag}{_KEPT if kept else ''}"

    def marked(self, description: str) -> ServiceKey | None:
        """Return the Service of this cluster whose mark the description is; None if it is another
        text."""
        mark = description.removesuffix(_KEPT).removesuffix(f" {self.tag}")
        if (
            mark == description.removesuffix(_KEPT)
            or not mark.startswith(_SERVICE)
            or "/" not in mark
        ):
            return None
        return ServiceKey.parse(mark.removeprefix(_SERVICE))


def is_kept(description: str) -> bool:
    """Return whether the object outlives the Service, according to the mark `description`."""
    return description.endswith(_KEPT)


def cluster_marked(description: str) -> str:
    """Return the uid of the cluster whose mark the description is; "" if it is no mark, or the mark
    of a kept object."""
    _, found, uid = f" {description}".rpartition(f" {_CLUSTER}")
    return uid if found and " " not in uid else ""


def service_tag(service: ServiceKey) -> str:
    return f"{_SERVICE}{service}"


def service_of(tags: Iterable[str]) -> tuple[ServiceKey, str] | None:
    """Return the Service to which the tags belong, with its uid; None without such a mark."""
    values = dict(tag.split("=", 1) for tag in tags if tag.startswith((_SERVICE, _UID)))
    key, uid = values.get(_SERVICE[:-1], ""), values.get(_UID[:-1], "")
    return (ServiceKey.parse(key), uid) if "/" in key and uid else None


def without_service(tags: Iterable[str]) -> tuple[str, ...]:
    """Return the tags of a load balancer that stays for other Services than the one for which it
    was made. Services of the namespace of that Service may still share it."""
    tags = tuple(tags)
    left = {tag for tag in tags if not tag.startswith((_SERVICE, _UID))}
    if (made_for := service_of(tags)) is not None:
        left.add(SHARED_WITH + made_for[0].namespace)
    return tuple(sorted(left))


def shares_with(
    owner: Owner, tags: Iterable[str], service: ServiceKey, names: Iterable[str] = ()
) -> bool:
    """Return whether this Service may share a load balancer with these tags: its owner has allowed
    it for the namespace, or the load balancer was made for a Service of the same namespace, by
    Fairlead or by cloud-provider-openstack. `names`: the names that cloud-provider-openstack gives
    to this Service's load balancer in the cluster whose load balancers are adopted."""
    tags = tuple(tags)
    if SHARED_WITH + service.namespace in tags:
        return True
    if any(tag.startswith(ANY) for tag in tags):
        made_for = owner.marked_service(tags)
        return made_for is not None and made_for[0].namespace == service.namespace
    own = f"_{service.namespace}_{service.name}"
    prefixes = [
        name.removesuffix(service.name)
        for name in names
        if name.startswith(OCCM) and name.endswith(own)
    ]
    # The name of a Service has no underscore. With an underscore, the load balancer belongs to a
    # cluster whose name begins with the name of this cluster.
    return any(
        tag.startswith(each) and "_" not in tag.removeprefix(each)
        for each in prefixes
        for tag in tags
    )


def ownerless(tags: Iterable[str]) -> bool:
    """Return whether Fairlead made the load balancer for a Service that is now deleted."""
    tags = tuple(tags)
    return any(tag.startswith(_CLUSTER) for tag in tags) and service_of(tags) is None


def clusters_of(tags: Iterable[str]) -> set[str]:
    """Return the uids of the clusters whose marks are among the tags."""
    return {tag.removeprefix(_CLUSTER) for tag in tags if tag.startswith(_CLUSTER)}


def explicit_tags(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(EXPLICIT + name for name in names))
