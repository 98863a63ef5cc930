"""Conflicts with other programs that announce addresses: on the host, and in the Kubernetes API.

In: the addresses that this host announces or may announce, the facts about the host
(`drivers.host_announcers`); a Service. Out: Findings, each with its remedy. A conflict in the
network itself, another host that answers for an address, is reported by the driver that hears it.
Pure. Invariant: a Finding does not change while its cause lasts."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from fairlead.announce_sections import Speaker
from fairlead.kube.objects import Service
from fairlead.model import Finding, Value
from fairlead.plan.members import listed

ADDRESS_ON_INTERFACE = "AddressOnInterface"
"""Code of a Finding: an interface of the host has an address that hosts are to announce."""
ANOTHER_BGP_DAEMON = "AnotherBgpDaemon"
"""Code of a Finding: another daemon of the host has BGP sessions."""
ANOTHER_CONTROLLER = "AnotherController"
"""Code of a Finding: another load-balancer controller serves the Service too."""
IPVS = "kube-ipvs0"
"""The interface to which kube-proxy in IPVS mode assigns the addresses of Services."""
LOOPBACK = "lo"
_INTERNAL = (IPVS, LOOPBACK)
"""Interfaces that no packet leaves. The host answers ARP for their addresses on others."""


class Daemon(Value, frozen=True):
    """A routing daemon of the host that is not Fairlead's. `name`: the daemon, as the subject of a
    sentence. `evidence`: what shows that it runs. `exports`: what the daemon needs in order to
    announce routes that Fairlead writes into a table of the kernel."""

    name: str
    evidence: str
    exports: str


class HostAnnouncers(Value, frozen=True):
    """The facts about a host. `holders`: by address, the interfaces that have it. `strict_arp`: the
    interfaces on which the host answers ARP only for addresses of that interface (arp_ignore).
    `daemons`: the other routing daemons."""

    holders: Mapping[str, Sequence[str]]
    strict_arp: Collection[str]
    daemons: Sequence[Daemon] = ()


def address_conflicts(
    addresses: Collection[str], host: HostAnnouncers, arrivals: Collection[str]
) -> Sequence[Finding]:
    """Return the Findings about addresses that this host has although hosts announce them.
    `arrivals`: the interfaces at which packets for the addresses arrive."""
    internal: dict[str, list[str]] = {}
    own: dict[str, list[str]] = {}
    lax = sorted(set(arrivals) - set(host.strict_arp))
    for address in sorted(addresses):
        for name in host.holders.get(address, ()):
            if name not in _INTERNAL:
                own.setdefault(name, []).append(address)
            elif lax and ":" not in address:  # Linux answers for IPv6 addresses of one interface
                internal.setdefault(name, []).append(address)
    return [
        *(_internal(name, each, lax) for name, each in sorted(internal.items())),
        *(_own(name, each) for name, each in sorted(own.items())),
    ]


def _internal(name: str, addresses: Sequence[str], lax: Sequence[str]) -> Finding:
    holder = "kube-proxy in mode ipvs" if name == IPVS else "another program"
    settings = "set ipvs.strictARP to true in the configuration of kube-proxy"
    if name != IPVS:
        settings = "set net.ipv4.conf.INTERFACE.arp_ignore to 1 and arp_announce to 2"
    return Finding(
        ADDRESS_ON_INTERFACE,
        f"{holder} has assigned {listed(addresses)} to {name}, so the kernel of this host answers "
        f"ARP requests for it on {listed(lax)}, whichever host announces it; where Fairlead "
        "announces addresses by L2, it drops these requests, but other interfaces and hosts "
        "without Fairlead still answer",
        subject=f"interface {name}",
        remedy=settings,
    )


def _own(name: str, addresses: Sequence[str]) -> Finding:
    return Finding(
        ADDRESS_ON_INTERFACE,
        f"{name} of this host has {listed(addresses)}: another program, such as kube-vip or "
        "keepalived, announces it too",
        severity="error",
        subject=f"interface {name}",
        remedy=f"stop that program for this address, then remove the address: ip address delete "
        f"{addresses[0]} dev {name}",
    )


def daemon_conflicts(host: HostAnnouncers, speaker: Speaker, route_table: int) -> Sequence[Finding]:
    """Return the Findings about other daemons of this host that have BGP sessions. With speaker
    `routes` they announce the addresses, so there is no conflict."""
    if speaker == "routes":
        return ()
    return [
        Finding(
            ANOTHER_BGP_DAEMON,
            f"{each.name} runs on this host and has BGP sessions too: a router accepts one session "
            "for each pair of addresses, so it refuses either the sessions of that daemon or those "
            "of Fairlead",
            subject=each.name,
            evidence=each.evidence,
            remedy=f"let that daemon announce the addresses: set announce.bgp.speaker to routes, "
            f"and let it {each.exports.format(table=route_table)}; or, for sessions of their own, "
            "give the host a second address, name it in sourceAddress of each peer, and set "
            "announce.bgp.localPort to another port than 179",
        )
        for each in host.daemons
    ]


_ALLOCATED = "ip-allocated-from-pool"
_MARKS = (
    (f"metallb.io/{_ALLOCATED}", "MetalLB", "exclude it by --lb-class of MetalLB"),
    (f"metallb.universe.tf/{_ALLOCATED}", "MetalLB", "exclude it by --lb-class of MetalLB"),
    ("kube-vip.io/vipHost", "kube-vip", "exclude it by lb_class_only of kube-vip"),
)
"""The annotations that other controllers write on the Services that they serve."""
_CONDITIONS = (("cilium.io/IPAMRequestSatisfied", "Cilium"),)
"""The conditions that other controllers write."""


def controller_conflicts(service: Service) -> Sequence[Finding]:
    """Return the Finding that another controller gives addresses to the Service, or announces
    them. With a spec.loadBalancerClass of Fairlead there is none: other controllers leave such
    Services alone, so their marks are old."""
    if service.spec.load_balancer_class is not None:
        return ()
    annotations = service.metadata.annotations
    marks: Iterable[tuple[str, str, str, str]] = [
        *(
            (system, f"annotation {name}", other, f"remove the annotation: {name}-")
            for name, system, other in _MARKS
            if name in annotations
        ),
        *(
            (system, f"condition {name}", "exclude it from Cilium's pools and policies", "")
            for each in service.status.conditions
            for name, system in _CONDITIONS
            if each.type == name
        ),
    ]
    found: dict[str, Finding] = {}
    for system, evidence, other, old in marks:
        remedy = f"set spec.loadBalancerClass (in a new Service), or {other}"
        found.setdefault(
            system,
            Finding(
                ANOTHER_CONTROLLER,
                f"{system} has served this Service: if it still does, both announce addresses for "
                "it and overwrite its status",
                evidence=evidence,
                remedy=f"{remedy}; if {system} is gone, {old}" if old else remedy,
            ),
        )
    return list(found.values())
