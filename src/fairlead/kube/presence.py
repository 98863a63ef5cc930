"""The Lease by which one instance of a role announces itself in the Kubernetes API, with a record
in an annotation. Pure.

In: a `Presence`. Out: the body of the Lease that announces it; and the reverse, the Presence in a
Lease. A Lease (coordination.k8s.io/v1) is the heartbeat of Kubernetes: it is built in, kubelets
announce nodes in the same way and at the same rate, and `kubectl get leases` shows it. The record
is bounded (`MAX_LISTED`), because it is written every few seconds. These Leases have a separate
namespace, like the Leases of kubelets: a gateway or node that may write there cannot write the
Lease by which the controller leads. Invariant: the times in a Lease are only for people to read. An
observer measures with its own clock how long a Lease has not changed. Only if all gateways leave
does a time decide: the one that left last keeps the addresses. Follows KEP-589 (node
heartbeats by Leases)."""

import re
from collections.abc import Mapping

import msgspec

from fairlead.kube.lease_object import Lease
from fairlead.kube.objects import Fields
from fairlead.model import ServiceKey

NAME_LABEL, COMPONENT_LABEL = "app.kubernetes.io/name", "app.kubernetes.io/component"
SELECTOR = f"{NAME_LABEL}=fairlead"
RECORD_ANNOTATION = "fairlead.io/presence"
LEAVE_ANNOTATION = "fairlead.io/leave"
"""Asks the gateway that holds the Lease to give its addresses away. The value is the Lease's
holderIdentity: the next process of the gateway has another one, and is not asked."""
FIELD_MANAGER = "fairlead-presence"
MAX_LISTED = 50
"""The maximum number of Services for which a record has the reason why they are not served, of
Warnings, of announced addresses, and of those that other stations use."""
MAX_NAMED = 1000
"""The maximum number of Services in a record that are listed as not served. A record within these
limits is shorter than the annotations of an object may be (256 KiB)."""
MAX_REASON_LENGTH = 200
MAX_ADDRESSES = 64
"""The maximum number of addresses in a record. A host with more leaves out own addresses from which
it does not reach others."""
MAX_NETWORKS = 64
"""The maximum number of networks in a record."""


class NotServed(Fields, frozen=True):
    """A Service that the instance cannot serve, or only partly, and why. Only the first Services of
    a record have a message."""

    service: str
    message: str = ""

    @property
    def key(self) -> ServiceKey:
        return ServiceKey.parse(self.service)


class Warned(Fields, frozen=True):
    """A Warning that the instance has written and that still holds: the reason of the Event, since
    when it holds, and the uid of the Service."""

    service: str
    reason: str
    since: str
    uid: str


class OnLink(Fields, frozen=True):
    """A network whose addresses the instance can announce, because it is on the link of this
    interface. `mac`: the MAC address of the interface. `settles`: the link has only just returned,
    so addresses stay with gateways whose link is steady."""

    interface: str
    network: str
    mac: str = ""
    settles: bool = False


class Announced(Fields, frozen=True):
    """An address that the instance announces on this interface, and since when, by its own
    clock."""

    address: str
    interface: str
    since: str


class Claimed(Fields, frozen=True):
    """An address that the instance announces on this interface, or accepts, and that another
    station there, which has this MAC address, also uses."""

    address: str
    interface: str
    mac: str


class Presence(Fields, frozen=True):
    """The record of one instance."""

    role: str
    name: str
    """The name of the host; for a controller a unique suffix follows."""
    version: str
    since: str
    """When the process started, by its own clock."""
    ready: bool = False
    problem: str = ""
    """Why it cannot do its work on its host now; it is not ready then."""
    problem_class: str = ""
    """The class of Services that `problem` concerns; empty: all Services."""
    leads: bool = False
    """For a controller: whether it leads."""
    interfaces: tuple[str, ...] = ()
    peer: str = ""
    """For a gateway that exchanges flow entries with all others: the `address:port` at which they
    connect to it. It connects to them from this address."""
    addresses: tuple[str, ...] = ()
    """For a gateway: the addresses that it needs itself, its own and those of its next hops."""
    macs: tuple[str, ...] = ()
    """For a gateway: the MAC addresses with which it answers for its addresses."""
    announces: tuple[OnLink, ...] = ()
    """For a gateway that announces addresses: the networks that are on the links of its
    interfaces."""
    announced_count: int = 0
    """The number of addresses that it announces."""
    announced: tuple[Announced, ...] = ()
    """The first of these addresses."""
    claimed: tuple[Claimed, ...] = ()
    """The first of its addresses that other stations use. A gateway that announces none: those that
    it accepts."""
    leaving: str = ""
    """Since when, by its own clock, it has given its addresses away: it announces only those that
    no other gateway can announce. Empty: it does not."""
    served: int = 0
    """The number of Services that it serves."""
    not_served_count: int = 0
    not_served: tuple[NotServed, ...] = ()
    """The first of the Services that are not served, sorted by name."""
    stale: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Stale watches, with their ages in seconds."""
    warned: tuple[Warned, ...] = ()


RECORD = msgspec.json.Decoder(Presence)


def lease_name(role: str, name: str) -> str:
    """Return the name of the Lease of one instance.

    A host name may contain characters that an object's name cannot, such as `gw_1` (RFC 1123); they
    are replaced."""
    return re.sub(r"[^a-z0-9.-]", "-", f"fairlead-{role}-{name}".lower())


def lease_body(
    presence: Presence, *, identity: str, now: str, lease_s: float, version: str = ""
) -> dict[str, object]:
    """Return the Lease that announces the instance.

    `identity`: the identity of the process; `now`: RFC 3339 with microseconds; `version`: the
    resourceVersion that the Lease must have; empty: any."""
    return {
        "metadata": ({"resourceVersion": version} if version else {})
        | {
            "labels": {NAME_LABEL: "fairlead", COMPONENT_LABEL: presence.role},
            "annotations": {RECORD_ANNOTATION: msgspec.json.encode(presence).decode()},
        },
        "spec": {
            "holderIdentity": identity,
            "renewTime": now,
            "leaseDurationSeconds": max(1, round(lease_s)),
        },
    }


def presence_of(lease: Lease) -> Presence | None:
    """Return the record in a Lease; None if there is none, or it cannot be decoded."""
    try:
        return RECORD.decode(lease.metadata.annotations.get(RECORD_ANNOTATION, ""))
    except msgspec.DecodeError:
        return None
