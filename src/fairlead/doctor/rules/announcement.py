"""Rules about gateways and announcers, from Leases and Announcers. Pure.

In: a `Facts`. Out: findings about processes, sessions and addresses. An Announcer counts only while
its process renews its Lease: the Announcer of a process that has ended is no longer updated."""

from collections.abc import Iterable

from fairlead.doctor.facts import Facts, Process
from fairlead.doctor.finding import Evidence, RootCause
from fairlead.kube.announcers import AnnouncerStatus, announcer_name
from fairlead.plan.members import listed

ROLES = ("gateway", "node")


def bgp_down(facts: Facts) -> Iterable[RootCause]:
    """Yield a finding for each BGP session that is not established."""
    for announcer in _current(facts):
        for session in announcer.sessions:
            if session.established or not facts.settled(session.since):
                continue
            origin = f"Announcer {announcer_name(announcer.role, announcer.host)} status.sessions"
            error = session.last_error or "no error was reported"
            since = session.since or "its start"
            yield RootCause(
                "bgp-down",
                "degraded" if any(each.established for each in announcer.sessions) else "broken",
                f"{announcer.role} {announcer.host}",
                f"The BGP session of {announcer.role} {announcer.host} with peer {session.peer} "
                f"({session.address}) has been {session.state} since {since}: {error}",
                (
                    Evidence("state", session.state, origin),
                    Evidence("last error", error, origin),
                ),
                f"kubectl get announcer {announcer_name(announcer.role, announcer.host)} -o yaml"
                "  # compare AS numbers, addresses and passwords with the router's configuration",
                "network operator",
            )


def address_conflict(facts: Facts) -> Iterable[RootCause]:
    """Yield a finding for each announced address that another host has too."""
    seen: dict[tuple[str, str], list[tuple[AnnouncerStatus, str]]] = {}
    services: dict[str, tuple[str, ...]] = {}
    for announcer in _current(facts):
        for each in announcer.conflicts:
            seen.setdefault((each.address, each.mac), []).append((announcer, each.interface))
            services[each.address] = each.services
    for (address, mac), places in seen.items():
        hosts = listed([f"{each.host} on {interface}" for each, interface in places])
        announcer = places[0][0]
        yield RootCause(
            "address-conflict",
            "broken",
            f"address {address}",
            f"Another host with the MAC address {mac} has the address {address}, which Fairlead "
            f"announces for {listed(services[address]) or 'a Service'}",
            (
                Evidence(
                    "seen by",
                    hosts,
                    f"Announcer {announcer_name(announcer.role, announcer.host)} status.conflicts",
                ),
            ),
            f"ip neighbor show to {address}  # find the port of {mac} on the switch; remove the "
            "address there, or exclude it from the pool",
            "network operator",
        )


def process_stale(facts: Facts) -> Iterable[RootCause]:
    """Yield a finding for each gateway or node that does not renew its Lease, or whose view of the
    cluster is stale."""
    for process in facts.processes or ():
        record = process.record
        if record.role not in ROLES:
            continue
        name = f"{record.role} {record.name}"
        origin = f"Lease of {name}"
        if not process.alive:
            yield RootCause(
                "gateway-stale",
                "degraded",
                name,
                f"{name} has not renewed its Lease since {process.renewed}: its process has ended, "
                "or it does not reach the API server, and it forwards by its last view of the "
                "cluster",
                (Evidence("renewTime", process.renewed, f"{origin} spec"),),
                f"fairlead status  # on host {record.name}: the age of its view of the cluster",
                "cluster operator",
            )
        elif record.stale:
            ages = ", ".join(f"{kind} {age} s" for kind, age in sorted(record.stale.items()))
            yield RootCause(
                "gateway-stale",
                "degraded",
                name,
                f"{name} has a stale view of the cluster: {', '.join(sorted(record.stale))}",
                (Evidence("age of watches", ages, f"{origin} metadata.annotations"),),
                f"fairlead status  # on host {record.name}: what its API server answers",
                "cluster operator",
            )


def gateways_differ(facts: Facts) -> Iterable[RootCause]:
    """Yield a finding for each gateway that cannot serve Services that another gateway serves."""
    live = [
        each.record
        for each in facts.processes or ()
        if each.alive
        and each.record.role == "gateway"
        and each.record.ready
        and not each.record.stale
        and facts.settled(each.record.since)
    ]
    if len(live) < 2:
        return
    common = set.intersection(*({each.service for each in one.not_served} for one in live))
    for one in live:
        only = [each for each in one.not_served if each.service not in common]
        if not only or one.not_served_count > len(one.not_served):
            continue
        why = only[0].message or "see `fairlead status` on the host"
        yield RootCause(
            "gateways-differ",
            "degraded",
            f"gateway {one.name}",
            f"Gateway {one.name} cannot serve {listed([each.service for each in only])}, which "
            "other gateways serve",
            (
                Evidence("not served", why, f"Lease of gateway {one.name} metadata.annotations"),
                Evidence(
                    "gateways", ", ".join(each.name for each in live), "Leases of the gateways"
                ),
            ),
            f"fairlead status  # on host {one.name}; compare its fairlead.yaml with other hosts",
            "cluster operator",
        )


def _current(facts: Facts) -> list[AnnouncerStatus]:
    """Return the Announcers of live processes."""
    alive = {_identity(each) for each in facts.processes or () if each.alive}
    return [each for each in facts.announcers or () if (each.role, each.host) in alive]


def _identity(process: Process) -> tuple[str, str]:
    return process.record.role, process.record.name
