"""Fairlead's own kinds, of group `fairlead.io`: AddressPool and AddressGrant.

In: JSON from the API server or manifests. Out: frozen Structs, as in `objects`. Both kinds are
cluster-scoped; what they demand of their fields is in `deploy/crds`. An AddressPool has addresses
to hand out. An AddressGrant is the lock on one address, and bears its name: who has not made it, or
is not written in it, may not publish the address."""

import ipaddress

import msgspec

from fairlead.config import ServiceAllocation
from fairlead.kube.networks import read_address
from fairlead.kube.objects import Condition, Fields, ObjectMeta, Resource
from fairlead.model import ServiceKey

GROUP_VERSION = "fairlead.io/v1alpha1"
POOL_FINALIZER = "fairlead.io/addresses-in-use"
"""On an AddressPool: it stays until nobody holds an address of it, and says meanwhile who does."""


class AddressPoolSpec(Fields, frozen=True):
    """The fields of `config.PoolConfig`. What a selector says and is not known here makes the pool
    unreadable: a restriction must not be overlooked."""

    addresses: tuple[str, ...] = ()
    auto_assign: bool = True
    avoid_buggy_ips: bool = msgspec.field(default=False, name="avoidBuggyIPs")
    service_allocation: ServiceAllocation | None = None


class KeptAddresses(Fields, frozen=True):
    """The addresses of a pool that a namespace keeps for deleted Services. `since`: of the oldest;
    `until`: when the first one becomes free."""

    namespace: str
    addresses: int
    since: str = ""
    until: str = ""


class AddressPoolStatus(Fields, frozen=True):
    """Counts are capped at what an int64 holds."""

    assigned_ipv4: int = msgspec.field(default=0, name="assignedIPv4")
    assigned_ipv6: int = msgspec.field(default=0, name="assignedIPv6")
    available_ipv4: int = msgspec.field(default=0, name="availableIPv4")
    available_ipv6: int = msgspec.field(default=0, name="availableIPv6")
    kept_addresses: int = 0
    kept: tuple[KeptAddresses, ...] = ()
    conditions: tuple[Condition, ...] = ()


class PoolMeta(ObjectMeta, frozen=True):
    generation: int = 0


class AddressPool(Fields, frozen=True):
    metadata: PoolMeta
    spec: AddressPoolSpec = msgspec.field(default_factory=AddressPoolSpec)
    status: AddressPoolStatus = msgspec.field(default_factory=AddressPoolStatus)


class Holder(Fields, frozen=True):
    """A Service that has these ports (`TCP/80`, sorted) of an address. Without `uid` it is a
    Service that is gone: the address is kept for the next one of its name.

    `kept_since` is the time since which the address is kept (RFC 3339); empty if it was kept before
    this field existed. `service_version` is the resourceVersion that the Service had when more was
    granted to it than it showed: only over that version may more be published (see
    `drivers.grants`)."""

    namespace: str
    name: str
    uid: str = ""
    ports: tuple[str, ...] = ()
    service_version: str = ""
    kept_since: str = ""

    @property
    def key(self) -> ServiceKey:
        return ServiceKey(self.namespace, self.name)


class AddressGrantSpec(Fields, frozen=True):
    address: str
    pool: str = ""
    sharing_key: str = ""
    keep: bool = False
    holders: tuple[Holder, ...] = ()


class AddressGrant(Fields, frozen=True):
    metadata: ObjectMeta
    spec: AddressGrantSpec

    @property
    def is_lock(self) -> bool:
        """Whether it is the lock on its address: it bears that name, and says the address as all of
        Fairlead does."""
        address = read_address(self.spec.address)
        return address == self.spec.address and self.metadata.name == grant_name(address)

    def holder(self, key: ServiceKey) -> Holder | None:
        """The entry of this Service."""
        return next((each for each in self.spec.holders if each.key == key), None)


ADDRESS_POOLS = Resource(GROUP_VERSION, "AddressPool", "addresspools", False, AddressPool)
ADDRESS_GRANTS = Resource(GROUP_VERSION, "AddressGrant", "addressgrants", False, AddressGrant)


def grant_name(address: str) -> str:
    """The name of the AddressGrant of an address: a DNS name, one for each address however it is
    written."""
    return ipaddress.ip_address(address).exploded.replace(":", "-")
