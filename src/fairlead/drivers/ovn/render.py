"""From LoadBalancers to rows of OVN.

In: a LoadBalancer with OvnSettings. Out: its ServiceSpec; and with the present row and the time,
the columns of each row. Pure. The columns depend on the present row in two ways: slots stay where
they are, and a backend that leaves keeps its connections in the drain key until its deadline. Both
are read back from the row itself, so a restart changes nothing. The row of a node has no drain key:
its gateway router keeps the connections of every backend."""

import math
from collections.abc import Collection, Iterator, Mapping

from fairlead.drivers.ovn.marks import DRAINS, REMOVED, drains_of, drains_text, marks_of
from fairlead.drivers.ovn.slots import assign, table_size
from fairlead.drivers.ovn.spec import (
    Columns,
    Frontend,
    Row,
    RowSpec,
    ServiceSpec,
    Site,
    backends_of,
    endpoint_text,
    row_name,
)
from fairlead.model import Listener, LoadBalancer, OvnSettings, PodMember, ServiceKey

MAX_AFFINITY_S = 65535
"""The longest affinity_timeout of OVN (ovn-nb(5))."""


def specs_of(
    site: Site, intents: Mapping[ServiceKey, LoadBalancer]
) -> dict[ServiceKey, ServiceSpec]:
    """Return what each Service of class ovn should have."""
    return {
        key: _spec_of(site, intent, intent.settings)
        for key, intent in intents.items()
        if isinstance(intent.settings, OvnSettings)
    }


def _spec_of(site: Site, intent: LoadBalancer, settings: OvnSettings) -> ServiceSpec:
    affinity_s = min(intent.affinity_timeout_s, MAX_AFFINITY_S)
    rows = [
        RowSpec(
            Frontend(address, listener.port, listener.protocol, node),
            tuple(sorted(weights.items())),
            tuple(sorted(draining)),
            affinity_s,
        )
        for listener in intent.listeners
        for node, (weights, draining) in _backends(site, listener, settings)
        for address in intent.listening(listener)
    ]
    return ServiceSpec(tuple(sorted(rows)), settings.drain_timeout_s)


def _backends(
    site: Site, listener: Listener, settings: OvnSettings
) -> Iterator[tuple[str, tuple[dict[str, int], list[str]]]]:
    """Yield the backends of each row of a listener: the node, the weights of the backends that get
    new connections, and the other backends."""
    if site.topology == "router":
        pods = settings.backends == "pods"
        yield "", _pods(listener.pods) if pods else _node_ports(listener)
        return
    if site.switches:
        yield "", _pods(listener.pods)
    for node in sorted({pod.node for pod in listener.pods} - {""}):
        yield node, _pods_of_node([pod for pod in listener.pods if pod.node == node])


def _pods(pods: Collection[PodMember]) -> tuple[dict[str, int], list[str]]:
    """Return the weights of the pods that get new connections, and the other pods."""
    texts = {pod: endpoint_text(pod.address, pod.port) for pod in pods}
    return (
        {text: 1 for pod, text in texts.items() if pod.state == "active"},
        [text for pod, text in texts.items() if pod.state == "draining"],
    )


def _pods_of_node(pods: Collection[PodMember]) -> tuple[dict[str, int], list[str]]:
    """Return the weights of the pods of one node that get new connections, and its other pods. If
    no pod is active, the draining pods that still serve get the connections that arrive until the
    upstream routers have stopped sending to the node."""
    weights, draining = _pods(pods)
    if weights:
        return weights, draining
    late = {endpoint_text(pod.address, pod.port): 1 for pod in pods if pod.still_serves}
    return late, [text for text in draining if text not in late]


def _node_ports(listener: Listener) -> tuple[dict[str, int], list[str]]:
    """Return the weights of the node ports that get new connections, and the other nodes' ports."""
    texts = {
        member: endpoint_text(member.address, listener.node_port) for member in listener.members
    }
    return (
        {
            text: member.weight
            for member, text in texts.items()
            if member.state == "active" and member.weight
        },
        [text for member, text in texts.items() if member.state != "active"],
    )


def columns_of(
    site: Site,
    service: ServiceKey,
    spec: RowSpec,
    drain_timeout_s: float,
    before: Row | None,
    now_s: float,
) -> Columns:
    """Return the columns of a row. `before`: the present row of this frontend. `now_s`: Unix
    time."""
    frontend = spec.frontend
    weights = dict(spec.weights)
    table = assign(_table(before), weights, table_size(weights, site.slots)) if weights else ()
    drains, deadlines = _drains(site, spec, drain_timeout_s, before, now_s)
    vips = {frontend.vip: ",".join(table)}
    if drains:
        vips[frontend.drain_vip(site)] = ",".join(sorted(drains))
    marks = marks_of(site.cluster, service, frontend.port, frontend.vip, frontend.node)
    if deadlines:
        marks[DRAINS] = drains_text(deadlines)
    return Columns(
        row_name(site.cluster, service, frontend),
        frontend.protocol.lower(),
        vips,
        _options(site, spec),
        marks,
    )


def emptied(
    site: Site, service: ServiceKey, row: Row, drain_timeout_s: float, now_s: float
) -> Columns:
    """Return the columns of the row of a Service or node that has no pods any more: it refuses new
    connections, and open ones continue until the row is deleted. The router does not answer ARP for
    the address, which may belong to another Service already."""
    spec = RowSpec(row.frontend)
    columns = columns_of(site, service, spec, drain_timeout_s, row, now_s)
    deadlines = list(drains_of(columns.external_ids).values())
    if row.frontend.node:
        # The connections of a gateway router are in no column. It also has to refuse packets that
        # arrive after the last pod has left: without the row, OVN sends them back.
        deadlines = [math.ceil(now_s + drain_timeout_s)]
    until = max(deadlines, default=math.floor(now_s))
    marks = {**columns.external_ids, REMOVED: str(until)}
    options = {**row.columns.options, "neighbor_responder": "none"}
    return Columns(columns.name, columns.protocol, columns.vips, options, marks)


def _table(row: Row | None) -> tuple[str, ...]:
    return backends_of(row.columns.vips.get(row.frontend.vip, "")) if row is not None else ()


def _drains(
    site: Site, spec: RowSpec, drain_timeout_s: float, before: Row | None, now_s: float
) -> tuple[set[str], dict[str, int]]:
    """Return the backends of the drain key, and the deadlines of the backends among them that no
    longer exist for the API. A backend that has never been in the row has no connections."""
    if before is None or spec.frontend.protocol == "UDP" or spec.frontend.node:
        # A UDP flow does not end by itself, so it must move to another pod at once.
        return set(), {}
    present = {
        *_table(before),
        *backends_of(before.columns.vips.get(spec.frontend.drain_vip(site), "")),
    }.difference(dict(spec.weights))
    existing = present.intersection(spec.draining)
    known = drains_of(before.columns.external_ids)
    ends_s = math.ceil(now_s + drain_timeout_s)
    # A known deadline lies further in the future if the clock was set back since it was written.
    deadlines = {
        backend: min(known.get(backend, ends_s), ends_s)
        for backend in present - existing
        if known.get(backend, ends_s) > now_s
    }
    return existing | deadlines.keys(), deadlines


def _options(site: Site, spec: RowSpec) -> dict[str, str]:
    """Return the options of a row. `reject`: without a backend, connections are refused at once.
    `skip_snat`: the backend sees the client's address, also if the router translates the source of
    load-balanced connections (lb_force_snat_ip)."""
    options = {"reject": "true", "neighbor_responder": site.neighbor_responder}
    if site.topology == "gateways":
        # Several routers have the address. None may answer ARP for it, because all would.
        options["neighbor_responder"] = "none"
    if site.gateway_router or site.topology == "gateways":
        # Only gateway routers have lb_force_snat_ip. On a distributed router, OVN 23.03 does not
        # translate replies back if the row has this option.
        options["skip_snat"] = "true"
    if site.hairpin_address:
        options["hairpin_snat_ip"] = site.hairpin_address
    if spec.frontend.protocol == "UDP":
        options["ct_flush"] = "true"
    if spec.affinity_timeout_s:
        options["affinity_timeout"] = str(spec.affinity_timeout_s)
    return options
