"""Which of several Services has a port of an address that they all want.

In: the precedence of each Service for the port. Out: the Service that has it, or the Services that
keep another from having it. The rule is one order: by what a Service bases its wish on, then the
older Service, then the name, as the conflict resolution of the Gateway API has it. A confirmed
basis comes before an unconfirmed one, so a Service that has a port keeps it, and an edit of one
Service moves no traffic of another. Invariant: pure; the order is total, so every process that
knows the same about the Services decides the same, whatever happened before and in whatever order.

Processes know different parts:
  controller  knows everything (`plan.ledger`). It writes a port into the status of one Service only
              and marks the port as failed in the others.
  gateway     knows what statuses show, and no grants (`plan.cluster`). While the controller writes,
              one Service at most shows a port, and that Service was granted it. If a status was
              edited by another client, all gateways give the port to the older Service until the
              controller has put the status right.
  node        knows the same, and Services that name addresses in spec.externalIPs, which any user
              may do (`roles.node`, `drivers.nodeproxy.transactions`).
  drivers     of class direct and proxy know what they have installed. They are the last line of
              defence: a Service whose port is still another's is unavailable and tried again, until
              the other Service has been planned without the port."""

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from fairlead.kube.networks import read_address
from fairlead.kube.objects import Service
from fairlead.model import ServiceKey
from fairlead.plan.addresses import order_of, shown_by


class Basis(IntEnum):
    """What a Service bases its wish for a port of an address on, the best first."""

    OWN = 0
    """The address is the Service's own ClusterIP, which the API server gives to no other."""
    GRANTED = 1
    """An AddressGrant names the Service and the port."""
    SHOWN = 2
    """The status shows the port at the address, or the API server has allocated the port."""
    GIVEN = 3
    """The address is the Service's, the port is not confirmed yet."""
    WISHED = 4
    """The Service asks for it, as spec.externalIPs does."""
    GONE = 5
    """There is no such Service any more; what it had is still in place."""


class Precedence(NamedTuple):
    """The place of one Service among those that want one port of an address; the lowest has it."""

    basis: Basis
    since: str
    """When the Service was created."""
    service: ServiceKey


def first(among: Iterable[Precedence]) -> ServiceKey:
    """The Service that has the port."""
    return min(among).service


def rivals_of(mine: Precedence, others: Iterable[Precedence]) -> list[ServiceKey]:
    """The Services that keep this one from having the port, sorted: those that come before it and
    have the port. A Service that only wishes for the port does not have it."""
    return sorted(each.service for each in others if each < mine and each.basis < Basis.WISHED)


def of_shown(key: ServiceKey, service: Service) -> Precedence:
    """The precedence for a port that the Service's status shows."""
    return Precedence(Basis.SHOWN, *order_of(key, service))


def precedence_of(key: ServiceKey, service: Service, address: str, port: str) -> Precedence:
    """The precedence by the Service alone, as a node sees it, for `port` (`TCP/80`) of an address
    that is no ClusterIP.

    A port of spec.ports that the status does not show yet at the Service's address comes after one
    that is shown, because the address may be shared. An address in spec.externalIPs that the status
    does not show comes last, because any user can name any address there. Everything else was
    allocated by the API server: a node port."""
    shown = shown_by(service)
    if address in shown:
        basis = Basis.SHOWN if port in shown[address] else Basis.GIVEN
    elif address in map(read_address, service.spec.external_ips):
        basis = Basis.WISHED
    else:
        basis = Basis.SHOWN
    return Precedence(basis, *order_of(key, service))
