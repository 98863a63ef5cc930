"""Decide which of several Services has a port of an address that they all request.

In: the precedence of each Service for the port. Out: the Service that has the port, or the Services
that prevent another one from having it. Services are ordered by the basis of their request, then
the older Service comes first, then the name decides, as in the conflict resolution of the Gateway
API. A confirmed basis comes before an unconfirmed one, so a Service that has a port keeps it, and
an edit of one Service moves no traffic of another. Invariant: pure; the order is total, so all
processes with the same data about the Services decide the same, whatever happened before.

Processes know different parts:
  controller  knows everything (`plan.ledger`). It writes a port into the status of one Service only
              and marks the port as failed in the others.
  gateway     knows what statuses show, and no grants (`plan.cluster`). While only the controller
              writes statuses, at most one Service shows a port, and the port is granted to that
              Service. If another client has edited a status, all gateways give the port to the
              older Service until the controller has corrected the status.
  node        knows the same as a gateway, and also the addresses in spec.externalIPs, which any
              user can set (`roles.node`, `drivers.nodeproxy.transactions`).
  drivers     of class direct and proxy know what they have installed. They are the last line of
              defence: while a port is still installed for another Service, the Service is
              unavailable and is retried, until the other Service has been planned without the
              port."""

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from fairlead.kube.networks import read_address
from fairlead.kube.objects import Service
from fairlead.model import ServiceKey
from fairlead.plan.addresses import order_of, shown_by


class Basis(IntEnum):
    """The basis of a Service's request for a port of an address, the strongest first."""

    OWN = 0
    """The address is the Service's own ClusterIP, which the API server assigns only once."""
    GRANTED = 1
    """An AddressGrant names the Service and the port."""
    SHOWN = 2
    """The status shows the port at the address, or the API server has allocated the port."""
    ASSIGNED = 3
    """The address is assigned to the Service; the port is not confirmed yet."""
    REQUESTED = 4
    """The Service only requests the port, for example by spec.externalIPs."""
    GONE = 5
    """The Service no longer exists, but its port is still installed."""


class Precedence(NamedTuple):
    """The precedence of one Service for one port of an address. The Service with the lowest value
    has the port."""

    basis: Basis
    since: str
    """When the Service was created."""
    service: ServiceKey


def first(among: Iterable[Precedence]) -> ServiceKey:
    """Return the Service that has the port."""
    return min(among).service


def rivals_of(mine: Precedence, others: Iterable[Precedence]) -> list[ServiceKey]:
    """Return the Services that prevent this one from having the port, sorted: the Services that
    come before it and have the port. A Service that only requests the port does not have it."""
    return sorted(each.service for each in others if each < mine and each.basis < Basis.REQUESTED)


def of_shown(key: ServiceKey, service: Service) -> Precedence:
    """Return the precedence for a port that the status of the Service shows."""
    return Precedence(Basis.SHOWN, *order_of(key, service))


def precedence_of(key: ServiceKey, service: Service, address: str, port: str) -> Precedence:
    """Return the precedence of a Service for `port` (`TCP/80`) of an address that is not a
    ClusterIP, based on the Service alone, as a node sees it.

    A port of spec.ports that the status does not show yet at the Service's address comes after one
    that is shown, because the address may be shared. An address in spec.externalIPs that the status
    does not show comes last, because any user can name any address there. Any other port is a node
    port, which the API server has allocated."""
    shown = shown_by(service)
    if address in shown:
        basis = Basis.SHOWN if port in shown[address] else Basis.ASSIGNED
    elif address in map(read_address, service.spec.external_ips):
        basis = Basis.REQUESTED
    else:
        basis = Basis.SHOWN
    return Precedence(basis, *order_of(key, service))
