"""By what Fairlead knows its own load balancers: tags, never names.

In: a cluster, a Service. Out: tags, names and descriptions; and back from tags to the Service.
Pure. Names are not unique in Octavia, and anybody may give any. A tag with a comma in it can be set
and never be found: none of ours can have one, as Kubernetes lets no name have it. Octavia cuts
nothing: 255 characters are the most for each of these texts."""

from collections.abc import Iterable

from fairlead.model import ServiceKey, Value

MAX_LENGTH = 255
ANY = "fairlead-"
"""Every tag of ours begins so."""
OCCM = "kube_service_"
"""Every tag of cloud-provider-openstack begins so: each is the name that it has for the load
balancer of one Service."""
_CLUSTER = "fairlead-cluster="
_SERVICE = "fairlead-service="
_UID = "fairlead-uid="
_KEPT = " fairlead-keep"
SHARED_WITH = "fairlead.io/shared-with="
"""Tag of a load balancer, followed by the name of a namespace: the owner of the load balancer
allows Services of that namespace to have listeners on it. The tag is not one of our marks: the
owner sets and removes it."""
COVERS = "fairlead-covers="
"""On a monitor of provider ovn: the floating IP for which it asks members."""
COVERS_ALL = f"{COVERS}all"
"""It does so for whichever comes."""
EXPLICIT = "fairlead-explicit="
"""On a listener, a setting that somebody asked for: without the wish it goes back to what the cloud
has."""


class Owner(Value, frozen=True):
    """A cluster. `uid`: of its namespace kube-system, which no two clusters share. `name`: for
    people."""

    uid: str
    name: str

    @property
    def tag(self) -> str:
        """What everything of this cluster carries."""
        return _CLUSTER + self.uid

    def tags(self, service: ServiceKey, uid: str) -> tuple[str, ...]:
        """Of a load balancer."""
        return tuple(sorted((self.tag, service_tag(service), _UID + uid)))

    def whose(self, tags: Iterable[str]) -> tuple[ServiceKey, str] | None:
        """The Service of this cluster, with its uid; None without such a mark."""
        tags = tuple(tags)
        return service_of(tags) if self.tag in tags else None

    def load_balancer_name(self, service: ServiceKey) -> str:
        return f"fairlead_{self.name}_{service.namespace}_{service.name}"[:MAX_LENGTH]

    def description(self, service: ServiceKey) -> str:
        return f"Kubernetes Service {service} of cluster {self.name}, made by Fairlead"[:MAX_LENGTH]

    def network_mark(self, service: ServiceKey, *, kept: bool = False) -> str:
        """The description of what the Service has at Neutron, where tags cannot be given to what is
        being made."""
        return f"{service_tag(service)} {self.tag}{_KEPT if kept else ''}"

    def marked(self, description: str) -> ServiceKey | None:
        """Whose that is."""
        mark = description.removesuffix(_KEPT).removesuffix(f" {self.tag}")
        if (
            mark == description.removesuffix(_KEPT)
            or not mark.startswith(_SERVICE)
            or "/" not in mark
        ):
            return None
        return ServiceKey.parse(mark.removeprefix(_SERVICE))


def is_kept(description: str) -> bool:
    """Of what carries our mark: whether it outlives the Service."""
    return description.endswith(_KEPT)


def cluster_marked(description: str) -> str:
    """The uid of the cluster whose mark that is; empty: nobody's, or of what is kept."""
    _, found, uid = f" {description}".rpartition(f" {_CLUSTER}")
    return uid if found and " " not in uid else ""


def service_tag(service: ServiceKey) -> str:
    return f"{_SERVICE}{service}"


def service_of(tags: Iterable[str]) -> tuple[ServiceKey, str] | None:
    """Whose it is, with the Service's uid; None without our mark."""
    told = dict(tag.split("=", 1) for tag in tags if tag.startswith((_SERVICE, _UID)))
    key, uid = told.get(_SERVICE[:-1], ""), told.get(_UID[:-1], "")
    return (ServiceKey.parse(key), uid) if "/" in key and uid else None


def without_service(tags: Iterable[str]) -> tuple[str, ...]:
    """The tags of a load balancer that stays for other Services than the one for which it was made.
    The namespace of that one may still share it."""
    tags = tuple(tags)
    left = {tag for tag in tags if not tag.startswith((_SERVICE, _UID))}
    if (made_for := service_of(tags)) is not None:
        left.add(SHARED_WITH + made_for[0].namespace)
    return tuple(sorted(left))


def shares_with(
    owner: Owner, tags: Iterable[str], service: ServiceKey, names: Iterable[str] = ()
) -> bool:
    """Whether this Service may share a load balancer with these tags: its owner has allowed it for
    the namespace, or it was made for a Service of the same namespace, by us or by
    cloud-provider-openstack. `names`: the names that the latter gives to this Service in the
    cluster whose load balancers are taken over."""
    tags = tuple(tags)
    if SHARED_WITH + service.namespace in tags:
        return True
    if any(tag.startswith(ANY) for tag in tags):
        made_for = owner.whose(tags)
        return made_for is not None and made_for[0].namespace == service.namespace
    own = f"_{service.namespace}_{service.name}"
    prefixes = [
        name.removesuffix(service.name)
        for name in names
        if name.startswith(OCCM) and name.endswith(own)
    ]
    # The name of a Service has no underscore: with one, the load balancer is of a cluster whose
    # name begins with this one's.
    return any(
        tag.startswith(each) and "_" not in tag.removeprefix(each)
        for each in prefixes
        for tag in tags
    )


def ownerless(tags: Iterable[str]) -> bool:
    """Whether a load balancer was made by us, and for a Service that is gone."""
    tags = tuple(tags)
    return any(tag.startswith(_CLUSTER) for tag in tags) and service_of(tags) is None


def clusters_of(tags: Iterable[str]) -> set[str]:
    """The uids of the clusters that it is marked for."""
    return {tag.removeprefix(_CLUSTER) for tag in tags if tag.startswith(_CLUSTER)}


def explicit_tags(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(EXPLICIT + name for name in names))
