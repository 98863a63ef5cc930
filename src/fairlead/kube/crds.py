"""Fairlead's CRDs, of group `fairlead.io`: AddressPool, AddressGrant and BGPPeer.

In: JSON from the API server or manifests. Out: frozen Structs, as in `objects`. All of them are
cluster-scoped; `deploy/crds` validates their fields. An AddressPool has addresses to assign. An
AddressGrant is the lock on one address, and its name is derived from the address. An address must
not be published without its AddressGrant, nor for a Service that the grant does not list. A BGPPeer
is a neighbor to which hosts announce addresses."""

import ipaddress
from collections.abc import Mapping
from typing import Any

import msgspec

from fairlead.config import ServiceAllocation
from fairlead.kube.networks import read_address
from fairlead.kube.objects import Condition, Fields, ObjectMeta, Resource
from fairlead.model import ServiceKey

GROUP_VERSION = "fairlead.io/v1alpha1"
POOL_FINALIZER = "fairlead.io/addresses-in-use"
"""Finalizer of an AddressPool: it stays while Services hold its addresses, and its status lists the
holders."""


class AddressPoolSpec(Fields, frozen=True):
    """The fields of `config.PoolConfig`.

    An unknown field of a selector makes the pool unreadable, because a restriction must not be
    ignored."""

    addresses: tuple[str, ...] = ()
    auto_assign: bool = True
    avoid_buggy_ips: bool = msgspec.field(default=False, name="avoidBuggyIPs")
    service_allocation: ServiceAllocation | None = None
    announce: Mapping[str, Any] = {}
    """The fields of `announce_sections.PoolAnnounce`. They are decoded later
    (`announce_checks.read_pool_section`), because a mistake in them must not make the addresses of
    the pool unusable."""


class KeptAddresses(Fields, frozen=True):
    """The addresses of a pool that a namespace keeps for deleted Services.

    `since`: the time since which the oldest of them is kept; `until`: the time at which the first
    of them becomes free."""

    namespace: str
    addresses: int
    since: str = ""
    until: str = ""


class AddressPoolStatus(Fields, frozen=True):
    """The status of a pool. Counts are limited to the range of an int64."""

    assigned_ipv4: int = msgspec.field(default=0, name="assignedIPv4")
    assigned_ipv6: int = msgspec.field(default=0, name="assignedIPv6")
    available_ipv4: int = msgspec.field(default=0, name="availableIPv4")
    available_ipv6: int = msgspec.field(default=0, name="availableIPv6")
    kept_addresses: int = 0
    kept: tuple[KeptAddresses, ...] = ()
    announce: Mapping[str, Any] | None = None
    """The last valid `spec.announce`. None: there was none yet."""
    conditions: tuple[Condition, ...] = ()


class GenerationMeta(ObjectMeta, frozen=True):
    generation: int = 0


class AddressPool(Fields, frozen=True):
    metadata: GenerationMeta
    spec: AddressPoolSpec = msgspec.field(default_factory=AddressPoolSpec)
    status: AddressPoolStatus = msgspec.field(default_factory=AddressPoolStatus)


class Holder(Fields, frozen=True):
    """A Service that holds these ports (`TCP/80`, sorted) of an address.

    Without `uid` the Service has been deleted, and the address is kept for the next Service of that
    name.

    `kept_since` is the time since which the address is kept (RFC 3339); it is empty if the address
    was kept before this field existed. `service_version` is the resourceVersion at which the
    Service was granted ports that its status did not show: these ports may be published only by a
    write that is conditional on that version (see `drivers.grants`)."""

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
        """Whether this grant is the lock on its address: the address is in canonical form, and the
        name of the grant is derived from it."""
        address = read_address(self.spec.address)
        return address == self.spec.address and self.metadata.name == grant_name(address)

    def holder(self, key: ServiceKey) -> Holder | None:
        """Return the entry of this Service, or None."""
        return next((each for each in self.spec.holders if each.key == key), None)


class BGPPeerStatus(Fields, frozen=True):
    """The status of a BGPPeer. `sessions`: on how many hosts the session is established, of all
    hosts that have it, such as `2/3`; empty while this is unknown."""

    sessions: str = ""
    conditions: tuple[Condition, ...] = ()


class BGPPeer(Fields, frozen=True):
    """`spec`: the fields of `announce_sections.BgpPeerSpec`, which are decoded later
    (`plan.peers`), so that a mistake in them has a message."""

    metadata: GenerationMeta
    spec: Mapping[str, Any] = {}
    status: BGPPeerStatus = msgspec.field(default_factory=BGPPeerStatus)


ADDRESS_POOLS = Resource(GROUP_VERSION, "AddressPool", "addresspools", False, AddressPool)
ADDRESS_GRANTS = Resource(GROUP_VERSION, "AddressGrant", "addressgrants", False, AddressGrant)
BGP_PEERS = Resource(GROUP_VERSION, "BGPPeer", "bgppeers", False, BGPPeer)


def grant_name(address: str) -> str:
    """Return the name of the AddressGrant of an address: a DNS name, the same for every notation of
    the address."""
    return ipaddress.ip_address(address).exploded.replace(":", "-")
