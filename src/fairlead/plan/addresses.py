"""What each Service asks of the pools, and what it has of them already.

In: a Service as it is, the AddressGrants that name it. Out: `Facts`, from which `plan.ledger`
assigns addresses. An address is taken by whoever its AddressGrant names, by whoever shows it in its
status (who had it before there were grants: it is granted to it first of all), and by whoever it is
kept for. Invariant: pure. Ports are written `TCP/80`: two Services may have one address, never one
port of it."""

from collections.abc import Iterable, Mapping

import msgspec

from fairlead.errors import Refused
from fairlead.kube.crds import AddressGrant
from fairlead.kube.networks import read_address
from fairlead.kube.objects import LoadBalancerIngress, Service
from fairlead.model import Family, Finding, Grant, ServiceKey
from fairlead.net.address import family_of
from fairlead.plan.annotations import ADDRESSES, KEEP_ADDRESS, POOL, SHARING_KEY, found, quoted
from fairlead.plan.pools import Applicant

Ports = frozenset[str]
Order = tuple[str, ServiceKey]
"""By which Services come first: creation time, then name."""


class Wanted(msgspec.Struct, frozen=True):
    """What one Service asks of the pools. `families` in order of preference; the first one it must
    get."""

    families: tuple[Family, ...]
    all_families: bool = False
    """It must get every family (RequireDualStack)."""
    requested: tuple[str, ...] = ()
    pool: str = ""
    since: str = ""
    """Creation time: who came first is served first."""
    ports: Ports = frozenset()
    sharing_key: str = ""
    keep: bool = False
    applicant: Applicant = Applicant("")


class Taken(msgspec.Struct, frozen=True):
    """What a Service has at one address. `granted`: ports that are its own by the AddressGrant,
    None if it is not in it; `shown`: ports that its status shows; `kept`: the address waits for a
    Service of this name, and has none."""

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
    """One Service: what it wants (None: nothing, it is going, gone or not ours), and what it has,
    by address."""

    wanted: Wanted | Refused | None = None
    taken: Mapping[str, Taken] = {}


class Rival(msgspec.Struct, frozen=True):
    """A port (`TCP/80`) that a Service cannot have at its address, and the Service that has it
    there."""

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
    """Its place among Services that want the same: the older first."""
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
    """`wants`: a class of ours is to serve it. `ours`: so it was, and what its status shows is ours
    too."""
    taken = {
        grant.spec.address: _granted(key, grant)
        for grant in grants
        if grant.holder(key) is not None
    }
    if service is None:
        return Facts(None, taken)
    if wants or ours:
        for address, ports in shown_by(service).items():
            taken[address] = msgspec.structs.replace(taken.get(address, Taken()), shown=ports)
    if not wants:
        return Facts(None, taken)
    try:
        return Facts(wanted_by(service, namespace_labels), taken)
    except Refused as error:
        return Facts(error, taken)


def _granted(key: ServiceKey, grant: AddressGrant) -> Taken:
    holder = grant.holder(key)
    kept = holder is None or not holder.uid
    ports = None if holder is None or kept else frozenset(holder.ports)
    since = holder.kept_since if holder is not None and kept else ""
    return Taken(
        granted=ports,
        kept=kept,
        kept_since=since,
        pool=grant.spec.pool,
        sharing_key=grant.spec.sharing_key,
    )


def wanted_by(service: Service, namespace_labels: Mapping[str, str] = {}) -> Wanted:
    """Read the wishes of a Service from its spec and annotations. Raises Refused for a request that
    is no address."""
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
            f"{quoted(text)} asks for two addresses of one family",
            fix="ask for one IPv4 and one IPv6 address at most",
        )
    return Wanted(
        families,
        all_families=spec.ip_family_policy == "RequireDualStack",
        requested=requested,
        pool=found(notes, POOL)[1],
        since=service.metadata.creation_timestamp or "",
        ports=ports_of(service),
        sharing_key=found(notes, SHARING_KEY)[1],
        keep=keeps(service),
        applicant=Applicant(service.metadata.namespace, service.metadata.labels, namespace_labels),
    )


def keeps(service: Service) -> bool:
    """Whether its addresses are to be kept when it is gone."""
    return found(service.metadata.annotations, KEEP_ADDRESS)[1].lower() == "true"


def ports_of(service: Service) -> Ports:
    """All ports of its spec."""
    return frozenset(f"{port.protocol}/{port.port}" for port in service.spec.ports)


def held_by(service: Service) -> tuple[str, ...]:
    """The addresses that a Service's status shows. What stands there and is none, nobody can
    call."""
    read = map(shown_address, service.status.load_balancer.ingress)
    return tuple(address for address in read if address is not None)


def shown_address(entry: LoadBalancerIngress) -> str | None:
    """The address that an entry of a status shows, be it within a hostname; None if there is none
    that can be read."""
    return read_address(entry.ip) if entry.ip else address_in(entry.hostname)


def hostname_of(address: str, suffix: str) -> str:
    """A name that leads to the address where the suffix is a zone such as nip.io:
    `203.0.113.7.nip.io`, and for IPv6, whose colons no name can have, `2001-db8--7.sslip.io`."""
    return f"{address.replace(':', '-')}.{suffix}"


def address_in(hostname: str) -> str | None:
    """What `hostname_of` put there; None if there is nothing of the kind."""
    labels = hostname.split(".")
    if len(labels) > 4 and (address := read_address(".".join(labels[:4]))) is not None:
        return address
    return (
        read_address(labels[0].replace("-", ":"))
        if len(labels) > 1 and labels[0].count("-") > 1
        else None
    )


def still_served(service: Service) -> tuple[str, ...]:
    """What a Service goes on with while nothing new is published, as `203.0.113.7 TCP/80`: nodes
    and gateways serve what is both in its status and in its spec."""
    wanted = ports_of(service)
    return tuple(
        f"{address} {port}"
        for address, ports in shown_by(service).items()
        for port in sorted(ports & wanted)
    )


def shown_by(service: Service) -> dict[str, Ports]:
    """The addresses that a Service's status shows, with the ports that are served there. An entry
    that names no ports, as others write them, stands for all of the Service's."""
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
            f"the requested address {quoted(text)} is not an IP address", fix=f"mend {where}"
        )
    return address
