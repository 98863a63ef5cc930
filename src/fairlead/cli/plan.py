"""`fairlead plan`: what Fairlead would do for a cluster or for manifests. It writes nothing and
does not need root."""

import asyncio
from typing import TYPE_CHECKING

import click
import msgspec

from fairlead.cli.output import Format, draw, output_option, show
from fairlead.cli.parameters import namespace_name
from fairlead.cli.source import Source, report_left_out, scan_source, source_options
from fairlead.config import Config, PoolConfig
from fairlead.errors import Refused
from fairlead.model import Finding, Listener, LoadBalancer, ServiceKey
from fairlead.net.address import join_host_port

if TYPE_CHECKING:
    from fairlead.kube.manifests import Manifests
    from fairlead.kube.objects import Service
    from fairlead.kube.submission import Submission
    from fairlead.state import State

EXAMPLE = Config(
    default_class="fairlead.io/direct",
    pools=(
        PoolConfig("example", ("203.0.113.10-203.0.113.250", "2001:db8:f::10-2001:db8:f::ffff")),
    ),
)

NO_NODE = "(no node)"


class Planned(msgspec.Struct, frozen=True, omit_defaults=True):
    """The plan of one Service: its load balancer, or the reason why it gets none."""

    service: str
    load_balancer: LoadBalancer | None = None
    known_later: str = ""
    """Facts that are unknown before the load balancer is created; empty: none."""
    refused: str = ""
    ours: bool = True
    """False: another controller serves the class."""
    members_known: bool = True
    """False: the pods are unknown, because Kubernetes creates the EndpointSlices later."""


@click.command()
@source_options
@click.option(
    "-n",
    "--namespace",
    callback=namespace_name,
    help="Show only the Services of this namespace; all are planned.",
)
@output_option
def plan(source: Source, namespace: str | None, output: Format) -> None:
    """Show what Fairlead would do for the Services, EndpointSlices and Nodes of a cluster or of
    manifests.

    For each Service of type LoadBalancer it shows the addresses, the listeners, the members with
    their weights and states, and which parts are not possible and why. The command changes nothing
    and only reads from the cluster. It calls no cloud; for Services whose addresses come from a
    cloud it reports which facts only the cloud knows. With -f it needs no cluster; without --config
    it shows example addresses.

    With -f it reads manifests as kubectl does, and treats each Service as the API server does: it
    adds what the server would add, and shows which Services the server would refuse. What the
    server chooses, such as node ports, is shown as known later.

    The exit status is 1 if a Service is refused, by the API server or by Fairlead, if an
    AddressPool is not used, or if a document of the manifests cannot be read; the others are
    planned nevertheless. A Service that another controller serves is not refused.

    \b
    fairlead plan -f examples/plan
    kubectl fairlead plan -n shop --context production"""
    config, manifests = _read(source)
    planned = [
        each
        for each in plan_of(config, manifests)
        if namespace in (None, ServiceKey.parse(each.service).namespace)
    ]
    where = f" in namespace {namespace}" if namespace is not None else ""
    show(planned, output, lambda: _table(planned, where))
    report_left_out(manifests)
    _report_ignored(manifests)
    problems = _unused_pools(config, manifests)
    for problem in problems:
        click.echo(f"{problem.subject} is not used: {problem}", err=True)
    if any(each.refused and each.ours for each in planned) or manifests.left_out_errors or problems:
        raise SystemExit(1)


def _read(source: Source) -> tuple[Config, "Manifests"]:
    if (access := source.access()) is not None:
        from fairlead.cli.cluster import read_cluster

        return asyncio.run(read_cluster(access, source.config))
    from fairlead.kube.manifests import manifests_of

    config, scanned = scan_source(source)
    service_cidrs = config.cluster.service_cidrs if config is not None else ()
    manifests = manifests_of(scanned, service_cidrs)
    if config is None:
        config = msgspec.structs.replace(EXAMPLE, pools=()) if manifests.address_pools else EXAMPLE
        whose = "addresses are examples, " if config.pools else ""
        click.echo(
            f"no --config: {whose}Services without a class are planned as fairlead.io/direct",
            err=True,
        )
    return config, manifests


def plan_of(config: Config, manifests: "Manifests") -> list[Planned]:
    from fairlead.cli.planning import plan_manifests
    from fairlead.plan.classes import CLASSES
    from fairlead.plan.service import class_of

    state, _, balancers = plan_manifests(config, manifests)
    planned = [
        Planned(str(key), refused=f"the API server would refuse it: {submission.refused}")
        for key, submission in manifests.submissions.items()
        if submission.refused
    ]
    for key, service in state.services.items():
        match balancers.get(key):
            case Refused() as error:
                planned.append(Planned(str(key), refused=str(error)))
            case LoadBalancer() as balancer:
                later = [CLASSES[balancer.class_name].known_later(balancer)]
                missing = ""
                if (submission := manifests.submissions.get(key)) is not None:
                    balancer = _without_placeholders(balancer, submission)
                    missing = _missing(service, state)
                    later += [*submission.known_later, missing]
                if missing:
                    balancer = _without_notes_on_members(balancer)
                planned.append(
                    Planned(
                        str(key),
                        balancer,
                        "; ".join(filter(None, later)),
                        members_known=not missing,
                    )
                )
            case None if service.spec.type == "LoadBalancer":
                name = class_of(service, config.default_class) or "none"
                planned.append(
                    Planned(str(key), refused=f"ignored, its class is {name}", ours=False)
                )
    return sorted(planned, key=lambda each: ServiceKey.parse(each.service))


def _without_placeholders(balancer: LoadBalancer, submission: "Submission") -> LoadBalancer:
    """Return the load balancer without the ports that the API server chooses. A node port of 0 is
    not known."""
    listeners = tuple(
        msgspec.structs.replace(each, node_port=0)
        if (each.port, each.protocol) in submission.chosen_node_ports
        else each
        for each in balancer.listeners
    )
    monitor = None if submission.chosen_health_port else balancer.health_monitor
    return msgspec.structs.replace(balancer, listeners=listeners, health_monitor=monitor)


def _missing(service: "Service", state: "State") -> str:
    """Return which objects of Kubernetes, without which the members of a Service are unknown, the
    manifests lack; empty: none. A Service without selector has no other EndpointSlices."""
    lacking = [] if state.nodes else ["no Node"]
    if service.spec.selector and not state.slices_of(service.key):
        lacking.append("no EndpointSlice of it")
    return f"the members, because the manifests have {' and '.join(lacking)}" if lacking else ""


def _without_notes_on_members(balancer: LoadBalancer) -> LoadBalancer:
    from fairlead.plan.notes import NO_NODES, NO_READY_ENDPOINTS

    notes = tuple(
        each for each in balancer.notes if each.code not in (NO_READY_ENDPOINTS, NO_NODES)
    )
    return msgspec.structs.replace(balancer, notes=notes)


def _report_ignored(manifests: "Manifests") -> None:
    if manifests.ignored:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(manifests.ignored.items()))
        click.echo(f"not read, because other kinds play no part: {kinds}", err=True)


def _unused_pools(config: Config, manifests: "Manifests") -> list[Finding]:
    """Return why AddressPools are not used. AddressPools that are being deleted are left out."""
    from fairlead.plan.pools import DELETED, read_pools

    problems = read_pools(config.pools, manifests.address_pools).problems
    return [each for each in problems.values() if each.code != DELETED]


def _table(planned: list[Planned], where: str) -> None:
    rows: list[tuple[str, ...]] = []
    for item in planned:
        if item.load_balancer is None:
            rows.append(
                (item.service, "-", "-", "-", "-", "-", "refused" if item.ours else "not ours")
            )
            continue
        if not item.load_balancer.listeners:
            rows.append((item.service, "(no port)", "-", "-", "-", "-", "-"))
            continue
        listeners = [
            (at, each)
            for each in item.load_balancer.listeners
            for at in item.load_balancer.listening(each) or _unknown(item, each)
        ]
        for number, cells in enumerate(
            cells
            for at, listener in listeners
            for cells in _rows(at, listener, members_known=item.members_known)
        ):
            rows.append(("" if number else item.service, *cells))
    if rows:
        draw(("SERVICE", "LISTENER", "POLICY", "NODE", "WEIGHT", "SHARE", "STATE"), rows)
        if any(NO_NODE in row for row in rows):
            click.echo(f"{NO_NODE}: no node can serve this port now, so its connections fail")
    else:
        click.echo(f"no Service of type LoadBalancer{where}")
    for item in planned:
        if item.refused:
            click.echo(f"{item.service}: {item.refused}")
        if item.known_later:
            click.echo(f"{item.service}: known later: {item.known_later}")
        for note in item.load_balancer.notes if item.load_balancer else ():
            click.echo(f"{item.service}: {note.code}: {note}")


def _unknown(item: Planned, listener: Listener) -> tuple[str, ...]:
    """Return the placeholder of the address of a listener that gets one from a cloud later."""
    from fairlead.plan.classes import CLASSES

    balancer = item.load_balancer
    later = balancer is not None and CLASSES[balancer.class_name].known_later(balancer)
    return (f"({listener.family} later)",) if later else ()


def _rows(address: str, listener: Listener, *, members_known: bool) -> list[tuple[str, ...]]:
    first = f"{join_host_port(address, listener.port)}/{listener.protocol}"
    active = sum(member.weight for member in listener.members if member.state == "active")
    rows: list[tuple[str, ...]] = []
    for member in listener.members:
        share = (
            f"{100 * member.weight / active:.1f} %" if member.state == "active" and active else "-"
        )
        rows.append((first, listener.policy, member.node, str(member.weight), share, member.state))
        first = ""
    placeholder = NO_NODE if members_known else "(known later)"
    return rows or [(first, listener.policy, placeholder, "-", "-", "-")]
