"""Load balancers of class ovn as values, and a table of rows to which changes are applied."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fairlead.drivers.ovn.changes import (
    AttachRow,
    AwaitFlows,
    Blocked,
    Change,
    CreateRow,
    DeleteRow,
    Report,
    UpdateRow,
)
from fairlead.drivers.ovn.diff import diff
from fairlead.drivers.ovn.marks import service_of
from fairlead.drivers.ovn.render import specs_of
from fairlead.drivers.ovn.spec import Row, ServiceRows, Site
from fairlead.model import (
    Listener,
    LoadBalancer,
    Member,
    OvnSettings,
    PodMember,
    Protocol,
    ServiceKey,
)

WEB, API = ServiceKey("default", "web"), ServiceKey("default", "api")
VIP, VIP6 = "203.0.113.40", "2001:db8:1::40"
SITE = Site("c1", "dr", ("pods",))
GATEWAYS = Site("c1", "GR_{node}", topology="gateways", routers=frozenset(("GR_n1", "GR_n2")))
NO_NODES: Mapping[str, str] = {}
DRAIN_S = 300.0
NOW_S = 1_764_201_600.0


def pods(
    active: Iterable[str], draining: Iterable[str] = (), nodes: Mapping[str, str] = NO_NODES
) -> tuple[PodMember, ...]:
    """Return pods with these addresses, on port 8080. `nodes`: their nodes, by address."""
    found = [PodMember(each, 8080, nodes.get(each, ""), "active") for each in active]
    found += [PodMember(each, 8080, nodes.get(each, ""), "draining") for each in draining]
    return tuple(sorted(found))


def intent(
    active: Iterable[str] = ("10.244.1.10",),
    draining: Iterable[str] = (),
    *,
    nodes: Mapping[str, str] = NO_NODES,
    key: ServiceKey = WEB,
    addresses: tuple[str, ...] = (VIP,),
    protocol: Protocol = "TCP",
    affinity_s: int = 0,
) -> LoadBalancer:
    """Return a Service with port 80 and these pods."""
    found = pods(active, draining, nodes)
    listeners = tuple(
        Listener(
            "IPv6" if ipv6 else "IPv4",
            80,
            protocol,
            "Local",
            30080,
            (),
            pods=tuple(pod for pod in found if (":" in pod.address) == ipv6),
        )
        for ipv6 in sorted({":" in each for each in addresses})
    )
    return LoadBalancer(
        key,
        f"uid-{key.name}",
        "fairlead.io/ovn",
        addresses,
        listeners,
        affinity_timeout_s=affinity_s,
        settings=OvnSettings(drain_timeout_s=DRAIN_S),
    )


def intent_by_node_ports(weights: Mapping[str, int], port: int = 30080) -> LoadBalancer:
    """Return a Service with port 80 whose backends are node ports of nodes with these addresses.
    Weight 0: the node drains."""
    members = tuple(
        Member(address, address, weight, "active" if weight else "draining")
        for address, weight in sorted(weights.items())
    )
    listeners = (Listener("IPv4", 80, "TCP", "Local", port, members),)
    settings = OvnSettings("nodePorts", DRAIN_S)
    return LoadBalancer(WEB, "uid", "fairlead.io/ovn", (VIP,), listeners, settings=settings)


class Table:
    """Rows in memory, to which changes are applied as the database would."""

    def __init__(self, site: Site = SITE) -> None:
        self.site = site
        self.rows: dict[str, Row] = {}
        self._numbers = itertools.count()

    def actual(self) -> dict[ServiceKey, ServiceRows]:
        """Return the rows by Service, as a driver reads them."""
        found: dict[ServiceKey, list[Row]] = {}
        for row in self.rows.values():
            key = service_of(row.columns.external_ids, SITE.cluster)
            assert key is not None
            found.setdefault(key, []).append(row)
        return {key: ServiceRows(tuple(rows)) for key, rows in found.items()}

    def changes(self, *intents: LoadBalancer, now_s: float = NOW_S) -> Sequence[Change]:
        """Return the changes to this state, computed from the rows alone."""
        desired = specs_of(self.site, {each.service: each for each in intents})
        return diff(self.site, desired, self.actual(), DRAIN_S, now_s)

    def become(self, *intents: LoadBalancer, now_s: float = NOW_S) -> Sequence[Change]:
        """Apply the changes to this state, and return them."""
        changes = self.changes(*intents, now_s=now_s)
        for change in changes:
            self._apply(change)
        return changes

    def row(self) -> Row:
        """Return the only row."""
        (row,) = self.rows.values()
        return row

    def _apply(self, change: Change) -> None:
        match change:
            case CreateRow():
                uuid = f"row{next(self._numbers)}"
                attached = frozenset(change.attachments)
                self.rows[uuid] = Row(uuid, change.frontend, change.columns, attached)
            case UpdateRow():
                assert self.rows[change.uuid].columns == change.before
                self.rows[change.uuid] = msgspec.structs.replace(
                    self.rows[change.uuid], columns=change.columns
                )
            case AttachRow():
                row = self.rows[change.uuid]
                self.rows[change.uuid] = msgspec.structs.replace(
                    row, attached=row.attached | {change.attachment}
                )
            case DeleteRow():
                del self.rows[change.uuid]
            case AwaitFlows() | Blocked() | Report():
                raise AssertionError(change)
