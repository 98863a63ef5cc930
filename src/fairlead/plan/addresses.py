"""Read what each Service requests from the pools, and which addresses it holds already.

In: a Service, and the AddressGrants that name it. Out: `Facts`, from which `plan.ledger` assigns
addresses. A Service holds an address if its AddressGrant names the Service, if the status of the
Service shows the address, or if the address is kept for the Service. An address that a status shows
and no AddressGrant records was published before AddressGrants existed; it is granted to its Service
before any new address is given. Invariant: pure. Ports are written `TCP/80`: two Services may hold
one address, but never the same port of the address."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fairlead.errors import Refused
from fairlead.kube.crds import AddressGrant
from fairlead.kube.networks import read_address
from fairlead.kube.objects import LoadBalancerIngress, Service
from fairlead.model import Family, Finding, Grant, ServiceKey
from fairlead.net.address import family_of
from fairlead.plan.annotation_reader import AnnotationReader, Values, any_text, switch
from fairlead.plan.annotations import ADDRESSES, KEEP_ADDRESS, POOL, SHARING_KEY, found, quoted
from fairlead.plan.pools import ServiceLabels
from fairlead.plan.understood import in_force

KEEP = switch(KEEP_ADDRESS)


def read_addresses(text: str) -> tuple[str, ...] | None:
    """Return the addresses of a list, at most one of each family; None if the text is not such a
    list."""
    found = [read_address(part) for part in text.split(",") if part.strip()]
    addresses = tuple(address for address in found if address is not None)
    valid = len(addresses) == len(found) == len({family_of(each) for each in addresses})
    return addresses if valid else None


VALUES: Sequence[Values[object]] = (
    Values(ADDRESSES, read_addresses, "at most one IPv4 and one IPv6 address"),
    any_text(POOL),
    any_text(SHARING_KEY),
    KEEP,
)
"""The values of the annotations about addresses, which every class reads."""

Ports = frozenset[str]
Order = tuple[str, ServiceKey]
"""A sort key of Services: creation time, then name."""


class AddressRequest(msgspec.Struct, frozen=True):
    """What one Service requests from the pools. `families`: the families in order of preference;
    the Service must get an address of the first one."""

    families: tuple[Family, ...]
    all_families: bool = False
    """The Service must get an address of every family (RequireDualStack)."""
    requested: tuple[str, ...] = ()
    pool: str = ""
    since: str = ""
    """Creation time: the older Service is served first."""
    ports: Ports = frozenset()
    sharing_key: str = ""
    keep: bool = False
    service_labels: ServiceLabels = ServiceLabels("")


class HeldAddress(msgspec.Struct, frozen=True):
    """What a Service holds at one address. `granted`: the ports that the AddressGrant gives to the
    Service; None: the AddressGrant does not name the Service. `shown`: the ports that its status
    shows. `kept`: the address is reserved for a Service of this name, which does not exist."""

    granted: Ports | None = None
    shown: Ports | None = None
    kept: bool = False
    kept_since: str = ""
    pool: str = ""
    sharing_key: str = ""

    @property
    def ports(self) -> Ports:
        return (self.granted or frozenset()) | (self.shown or frozenset())


class Facts(msgspec.Struct, frozen=True):
    """What one Service requests, and what it holds, by address. `request`: None for a Service that
    does not exist, is being deleted, or needs no address from a pool; Refused for an invalid
    request."""

    request: AddressRequest | Refused | None = None
    held: Mapping[str, HeldAddress] = {}


class Rival(msgspec.Struct, frozen=True):
    """A port (`TCP/80`) that a Service cannot have at its address, and the Service that holds the
    port there."""

    port: str
    address: str
    holder: ServiceKey


class Assigned(msgspec.Struct, frozen=True):
    """The addresses of one Service, in the order of its families, each with the same ports."""

    grants: tuple[Grant, ...]
    rivals: tuple[Rival, ...] = ()
    notes: tuple[Finding, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(grant.address for grant in self.grants)


def order_of(key: ServiceKey, service: Service) -> Order:
    """Return the sort key of the Service among Services with the same request: the older first."""
    return service.metadata.creation_timestamp or "", key


def facts_of(
    key: ServiceKey,
    service: Service | None,
    grants: Iterable[AddressGrant],
    *,
    wants: bool,
    ours: bool,
    namespace_labels: Mapping[str, str],
) -> Facts:
    """Return the facts of one Service. `service`: None if the Service does not exist. `wants`: the
    Service is to get addresses from pools. `ours`: the Service is claimed for a class whose
    addresses come from pools.

    The Service holds the addresses in its status if either is true, and also if another controller
    serves it: no other Service may get them, for example while a pool of MetalLB is already an
    AddressPool and MetalLB still serves its Services."""
    held = {
        grant.spec.address: _granted(key, grant)
        for grant in grants
        if grant.holder(key) is not None
    }
    if service is None:
        return Facts(None, held)
    if wants or ours or service.spec.type == "LoadBalancer":
        for address, ports in shown_by(service).items():
            held[address] = msgspec.structs.replace(held.get(address, HeldAddress()), shown=ports)
    if not wants:
        return Facts(None, held)
    try:
        return Facts(address_request_of(service, namespace_labels), held)
    except Refused as error:
        return Facts(error, held)


def _granted(key: ServiceKey, grant: AddressGrant) -> HeldAddress:
    holder = grant.holder(key)
    kept = holder is None or not holder.uid
    ports = None if holder is None or kept else frozenset(holder.ports)
    since = holder.kept_since if holder is not None and kept else ""
    return HeldAddress(
        granted=ports,
        kept=kept,
        kept_since=since,
        pool=grant.spec.pool,
        sharing_key=grant.spec.sharing_key,
    )


def address_request_of(
    service: Service, namespace_labels: Mapping[str, str] = {}
) -> AddressRequest:
    """Return what a Service requests in its spec and annotations. Raise Refused if a requested
    address is not an IP address, or if two of them are of the same family."""
    service, _ = in_force(service, VALUES)
    spec, notes = service.spec, service.metadata.annotations
    families: tuple[Family, ...] = (
        spec.ip_families
        or tuple(dict.fromkeys(family_of(a) for a in spec.cluster_ips))
        or ("IPv4",)
    )
    name, text = found(notes, ADDRESSES)
    if not text:
        name, text = "spec.loadBalancerIP", spec.load_balancer_ip
    requested = tuple(_canonical(part, name) for part in text.split(",") if part.strip())
    if len({family_of(address) for address in requested}) < len(requested):
        raise Refused(
            f"{quoted(text)} requests two addresses of one family",
            fix="request at most one IPv4 and one IPv6 address",
        )
    return AddressRequest(
        families,
        all_families=spec.ip_family_policy == "RequireDualStack",
        requested=requested,
        pool=found(notes, POOL)[1],
        since=service.metadata.creation_timestamp or "",
        ports=ports_of(service),
        sharing_key=found(notes, SHARING_KEY)[1],
        keep=keeps(service),
        service_labels=ServiceLabels(
            service.metadata.namespace, service.metadata.labels, namespace_labels
        ),
    )


def keeps(service: Service) -> bool:
    """Return whether the addresses of the Service are to be kept after its deletion. An address is
    also kept if no value was understood, because a released address is lost."""
    try:
        service, _ = in_force(service, (KEEP,))
    except Refused:
        return True
    return AnnotationReader(service.metadata.annotations).get(KEEP, False)


def ports_of(service: Service) -> Ports:
    """Return all ports of the spec."""
    return frozenset(f"{port.protocol}/{port.port}" for port in service.spec.ports)


def held_by(service: Service) -> tuple[str, ...]:
    """Return the addresses that the status of the Service shows. An entry that is not an address is
    left out."""
    read = map(shown_address, service.status.load_balancer.ingress)
    return tuple(address for address in read if address is not None)


def shown_address(entry: LoadBalancerIngress) -> str | None:
    """Return the address that an entry of a status shows, as an IP address or within a hostname;
    None if the entry contains no valid address."""
    return read_address(entry.ip) if entry.ip else address_in(entry.hostname)


def hostname_of(address: str, suffix: str) -> str:
    """Return a hostname that resolves to the address if the suffix is a zone such as nip.io:
    `203.0.113.7.nip.io`. In an IPv6 address, dashes replace the colons, which a hostname cannot
    contain: `2001-db8--7.sslip.io`."""
    return f"{address.replace(':', '-')}.{suffix}"


def address_in(hostname: str) -> str | None:
    """Return the address that `hostname_of` wrote into the hostname; None if it contains none."""
    labels = hostname.split(".")
    if len(labels) > 4 and (address := read_address(".".join(labels[:4]))) is not None:
        return address
    return (
        read_address(labels[0].replace("-", ":"))
        if len(labels) > 1 and labels[0].count("-") > 1
        else None
    )


def still_served(service: Service) -> tuple[str, ...]:
    """Return the ports that stay served while nothing new is published, as `203.0.113.7 TCP/80`:
    nodes and gateways serve each port that is both in the status and in the spec."""
    request = ports_of(service)
    return tuple(
        f"{address} {port}"
        for address, ports in shown_by(service).items()
        for port in sorted(ports & request)
    )


def shown_by(service: Service) -> dict[str, Ports]:
    """Return the addresses that the status of the Service shows, with the ports that are served
    there. An entry without ports, as other controllers write it, stands for all ports of the
    spec."""
    shown: dict[str, Ports] = {}
    for entry in service.status.load_balancer.ingress:
        if (address := shown_address(entry)) is not None:
            named = frozenset(
                f"{port.protocol}/{port.port}" for port in entry.ports if port.error is None
            )
            ports = named if entry.ports else ports_of(service)
            shown[address] = shown.get(address, frozenset()) | ports
    return shown


def _canonical(text: str, where: str) -> str:
    if (address := read_address(text)) is None:
        raise Refused(
            f"the requested address {quoted(text)} is not an IP address", fix=f"correct {where}"
        )
    return address
