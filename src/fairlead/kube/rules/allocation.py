"""Allocate cluster addresses and node ports to Services.

In: a Service that is being written, and the Service that it replaces. Out: its addresses and ports
are filled in; a Reservation is committed or rolled back, so a write that fails later takes nothing.
Invariants: an address or port belongs to one Service; node ports and health check node ports share
one range. Follows the Service storage of the API server (registry/core/service/storage,
ipallocator, portallocator).
"""

import ipaddress
from collections.abc import Collection, Iterable, Sequence

from fairlead.errors import FairleadError, Refused
from fairlead.kube.rules.causes import NoneFree, Object, Rejected, UsedTwice, invalid
from fairlead.kube.rules.names import family_of, parse_address

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

FIRST_NODE_PORT = 30000
LAST_NODE_PORT = 32767


class NodePorts:
    """The node port range. Ports are allocated in order, so runs are repeatable; a freed port is
    reused after all others.

    The lower part is reserved for requests of a specific port, and allocated to others last
    (KEP-3668).
    """

    def __init__(self, first: int = FIRST_NODE_PORT, last: int = LAST_NODE_PORT) -> None:
        self._first, self._last = first, last
        self.taken: set[int] = set()
        self.avoid: Collection[int] = ()
        """Ports that are not chosen, because a later request asks for them."""
        self._next = first + _reserved(last - first + 1, smallest=16, share=32, largest=128)

    def take(self, port: int, *, anywhere: bool = False) -> None:
        """Allocate a specific port. Raise ValueError with the API's message if it is taken or out
        of range; with `anywhere` the range is not checked."""
        if not anywhere and not self._first <= port <= self._last:
            raise ValueError(
                "provided port is not in the valid range. The range of valid ports is "
                f"{self._first}-{self._last}"
            )
        if port in self.taken:
            raise ValueError("provided port is already allocated")
        self.taken.add(port)

    def take_any(self) -> int:
        size = self._last - self._first + 1
        for step in range(size):
            port = self._first + (self._next - self._first + step) % size
            if port not in self.taken and port not in self.avoid:
                self.taken.add(port)
                self._next = port + 1
                return port
        raise ValueError("range is full")

    def free(self, port: int) -> None:
        self.taken.discard(port)


def _reserved(size: int, *, smallest: int, share: int, largest: int) -> int:
    """Return the size of the part of a range that is reserved for specific requests; 0 if the range
    is too small for it."""
    return min(max(smallest, size // share), largest) if size > smallest else 0


class ClusterAddresses:
    """The addresses of one service CIDR. The first belongs to the API server (`kubernetes.default`)
    and is never allocated. The lower part is reserved for requests of a specific address, and
    allocated to others last (KEP-3070)."""

    def __init__(self, network: Network) -> None:
        self._network = network
        broadcast = 1 if network.version == 4 else 0
        self._first = 2
        self._last = min(network.num_addresses - 1 - broadcast, 1 << 20)
        self.taken: set[int] = set()
        self._next = 1 + _reserved(self._last, smallest=16, share=16, largest=256)

    def take(self, text: str) -> None:
        """Allocate a specific address. Raise ValueError with the API's message if it is taken or
        outside the CIDR."""
        address = parse_address(text)
        if address is None or address not in self._network:
            raise ValueError("the provided network does not match the current range")
        if int(address) in self.taken:
            raise ValueError("provided IP is already allocated")
        self.taken.add(int(address))

    def take_any(self) -> str:
        base, size = int(self._network.network_address), self._last - self._first + 1
        for step in range(size):
            offset = self._first + (self._next - self._first + step) % size
            if base + offset not in self.taken:
                self.taken.add(base + offset)
                self._next = offset + 1
                return str(self._network[offset])
        raise ValueError("range is full")

    def hold(self, text: str) -> None:
        """Take an address that a Service has, if it is valid."""
        address = parse_address(text)
        if address is not None:
            self.taken.add(int(address))

    def free(self, text: str) -> None:
        address = parse_address(text)
        if address is not None:
            self.taken.discard(int(address))


class Reservation:
    """What one write has allocated and what it releases. Call `commit` once the object is stored,
    else `rollback`."""

    def __init__(self, allocator: "Allocator", *, dry_run: bool) -> None:
        self._allocator = allocator
        self._dry_run = dry_run
        self._taken_ports: list[int] = []
        self._taken_addresses: list[str] = []
        self.free_ports: set[int] = set()
        self.free_addresses: set[str] = set()

    def port(self, wanted: int) -> int:
        ports = self._allocator.ports
        if wanted:
            # As in the API server, a dry run does not check the range.
            ports.take(wanted, anywhere=self._dry_run)
        else:
            wanted = ports.take_any()
        self._taken_ports.append(wanted)
        return wanted

    def address(self, family: str, wanted: str) -> str:
        addresses = self._allocator.addresses[family]
        if wanted:
            addresses.take(wanted)
        else:
            wanted = addresses.take_any()
        self._taken_addresses.append(wanted)
        return wanted

    def commit(self) -> None:
        self._allocator.free(self.free_addresses, self.free_ports)

    def rollback(self) -> None:
        self._allocator.free(self._taken_addresses, self._taken_ports)


class Allocator:
    """All cluster addresses and node ports. The family of the first CIDR is the cluster's
    default."""

    def __init__(self, cidrs: Sequence[str]) -> None:
        try:
            networks = [ipaddress.ip_network(text) for text in cidrs]
        except ValueError as error:
            raise Refused(
                f"invalid service CIDR: {error}",
                fix="specify one network for each address family",
            ) from error
        self.addresses = {
            f"IPv{network.version}": ClusterAddresses(network) for network in networks
        }
        self.families = list(self.addresses)
        self.ports = NodePorts()

    def free(self, addresses: Iterable[str], ports: Iterable[int]) -> None:
        for address in addresses:
            if family_of(address) in self.addresses:
                self.addresses[family_of(address)].free(address)
        for port in ports:
            self.ports.free(port)

    def release(self, service: Object) -> None:
        """Free everything that a deleted Service held."""
        self.free(addresses_of(service), ports_of(service))

    def reserve(self, service: Object, old: Object | None, *, dry_run: bool = False) -> Reservation:
        """Fill in the missing addresses and ports of `service`, in place. Raise Rejected,
        NoneFree or UsedTwice with nothing allocated."""
        reservation = Reservation(self, dry_run=dry_run)
        try:
            _reserve_addresses(reservation, service, old)
            _reserve_node_ports(reservation, service, old)
            _reserve_health_check_port(reservation, service, old)
        except FairleadError:
            reservation.rollback()
            raise
        if old is not None:
            reservation.free_addresses = set(addresses_of(old)) - set(addresses_of(service))
            reservation.free_ports = set(ports_of(old)) - set(ports_of(service))
        return reservation


def addresses_of(service: Object) -> list[str]:
    return [
        address
        for address in service["spec"].get("clusterIPs") or []
        if address not in ("", "None")
    ]


def node_ports_of(service: Object) -> list[int]:
    return [port["nodePort"] for port in service["spec"].get("ports") or [] if port.get("nodePort")]


def ports_of(service: Object) -> list[int]:
    health = service["spec"].get("healthCheckNodePort") or 0
    return [*node_ports_of(service), *([health] if health else [])]


def needs_health_check(service: Object) -> bool:
    spec = service["spec"]
    return (spec.get("type"), spec.get("externalTrafficPolicy")) == ("LoadBalancer", "Local")


def needs_node_ports(service: Object) -> bool:
    return service["spec"].get("type") in ("NodePort", "LoadBalancer")


def _reserve_addresses(reservation: Reservation, service: Object, old: Object | None) -> None:
    spec = service["spec"]
    if spec.get("type") == "ExternalName":
        return
    # A Service that had addresses and now wants to be headless is processed further: the rules for
    # updates reject it afterwards.
    if spec.get("clusterIP") == "None" and (old is None or not addresses_of(old)):
        return
    held = len(addresses_of(old)) if old and old["spec"].get("type") != "ExternalName" else 0
    wanted = list(spec.get("clusterIPs") or [])
    wanted += [""] * (len(spec["ipFamilies"]) - len(wanted))
    given = []
    for index, family in enumerate(spec["ipFamilies"]):
        address = wanted[index]
        # An address that was set before cannot change. The rules for updates reject that with a
        # message of their own, so it is not allocated here.
        if index >= held or not address:
            try:
                address = reservation.address(family, address)
            except ValueError as error:
                if not address:
                    raise NoneFree(f"failed to allocate a serviceIP: {error}") from error
                detail = f"failed to allocate IP {address}: {error}"
                raise Rejected([invalid("spec.clusterIPs", wanted, detail)]) from error
        given.append(address)
    spec["clusterIPs"] = given
    spec["clusterIP"] = given[0]


def _reserve_node_ports(reservation: Reservation, service: Object, old: Object | None) -> None:
    """Allocate a node port for each port, if the Service's type has node ports and it does not opt
    out."""
    if not needs_node_ports(service):
        return
    wants = (
        service["spec"]["type"] == "NodePort"
        or service["spec"].get("allocateLoadBalancerNodePorts") is not False
    )
    ports = [
        (index, port)
        for index, port in enumerate(service["spec"].get("ports") or [])
        if wants or port.get("nodePort")
    ]
    if old is None:
        _first_node_ports(reservation, service, ports)
    else:
        _next_node_ports(reservation, service, ports, set(node_ports_of(old)))


def _first_node_ports(
    reservation: Reservation, service: Object, ports: list[tuple[int, Object]]
) -> None:
    """Allocate the node ports of a new Service. Ports with the same number (TCP and UDP) share a
    node port, to save the range."""
    shared: dict[int, int] = {}
    for index, port in ports:
        number, given = port.get("port", 0), shared.get(port.get("port", 0), 0)
        if not given:
            requested = [
                other["nodePort"]
                for _, other in ports
                if other.get("nodePort") and other.get("port", 0) == number
            ]
            port["nodePort"] = shared[number] = _take_node_port(
                reservation, index, requested[0] if requested else 0
            )
        elif not port.get("nodePort"):
            port["nodePort"] = given
        elif port["nodePort"] != given:
            _take_node_port(reservation, index, port["nodePort"])


def _next_node_ports(
    reservation: Reservation, service: Object, ports: list[tuple[int, Object]], held: set[int]
) -> None:
    taken: set[int] = set()
    seen: set[tuple[str, int]] = set()
    for index, port in ports:
        wanted = port.get("nodePort") or 0
        if not wanted or wanted not in held | taken:
            port["nodePort"] = _take_node_port(reservation, index, wanted)
            taken.add(port["nodePort"])
        pair = (port.get("protocol", ""), port["nodePort"])
        if pair in seen:
            raise UsedTwice(f"duplicate nodePort: {{{pair[0]} {pair[1]}}}")
        seen.add(pair)


def _take_node_port(reservation: Reservation, index: int, wanted: int) -> int:
    try:
        return reservation.port(wanted)
    except ValueError as error:
        if not wanted:
            raise NoneFree(f"failed to allocate a nodePort: {error}") from error
        raise Rejected([invalid(f"spec.ports[{index}].nodePort", wanted, str(error))]) from error


def _reserve_health_check_port(
    reservation: Reservation, service: Object, old: Object | None
) -> None:
    if not needs_health_check(service) or (old is not None and needs_health_check(old)):
        return
    spec = service["spec"]
    wanted = spec.get("healthCheckNodePort") or 0
    try:
        spec["healthCheckNodePort"] = reservation.port(wanted)
    except ValueError as error:
        port = f"requested HealthCheck NodePort {wanted}" if wanted else "a HealthCheck NodePort 0"
        raise NoneFree(f"failed to allocate {port}: {error}") from error
