"""What a node requires of its host, so that clients' packets are accepted.

In: the interfaces at which packets from gateways arrive, and the interfaces through which clients
are answered. Out: `SysctlRequirement`s.

- Reverse path filtering: a gateway passes on a client's packet unchanged. With strict filtering
  (RFC 3704, rp_filter 1) the kernel silently drops it unless the route back to the client leads
  through the interface at which it arrived. IPv6 has no such setting.
- ARP: kube-proxy in IPVS mode assigns the load-balancer addresses to the node itself, at its
  interface `kube-ipvs0`. Linux answers ARP requests for the addresses of all interfaces at each of
  them, and may use any of them as the source of its own requests (ip-sysctl, arp_ignore and
  arp_announce). The router then sends clients' packets to that node, past the gateways.
  kube-proxy's own option `ipvs.strictARP` sets the same values.

Our own VXLAN devices are not checked here: `devices` sets their values when it creates them."""

from collections.abc import Collection, Sequence
from functools import partial

from fairlead.drivers.sysctl_requirement import SysctlRequirement
from fairlead.net import sysctl
from fairlead.net.interfaces import default_devices, holders, links, present
from fairlead.net.selection import DEFAULT_ROUTE, select

STRICT, LOOSE = "1", "2"
IPVS = "kube-ipvs0"
"""The interface to which kube-proxy in IPVS mode assigns the addresses of Services."""
OWN_ONLY, BEST_OWN = "1", "2"


async def requirements(
    node_addresses: Sequence[str], selectors: Sequence[str]
) -> tuple[SysctlRequirement, ...]:
    """Return the requirements for this host's present interfaces and routes. `selectors`: select
    the interfaces at which packets of gateways arrive, as in the configuration; without any, the
    interfaces with the node's addresses are used."""
    if selectors:
        arrivals: Sequence[str] = select(
            selectors, present(routes=DEFAULT_ROUTE in selectors)
        ).names
    else:
        arrivals = [link.name for link in holders(node_addresses)]
    answers = default_devices()
    strict = requirements_of(
        arrivals, answers, everywhere=sysctl.read("net/ipv4/conf/all/rp_filter") or "0"
    )
    return (*strict, *(_arp_requirements(arrivals) if IPVS in links() else ()))


def _arp_requirements(arrivals: Collection[str]) -> tuple[SysctlRequirement, ...]:
    """Return the requirements for a node that has load-balancer addresses itself. The kernel uses
    the greater of the interface's value and the value of `all`."""
    why = (
        f"{IPVS} has the load-balancer addresses: this node {{}} for them, and so diverts clients' "
        "packets from the gateways"
    )
    made = []
    for name in arrivals:
        for setting, recommended, what in (
            ("arp_ignore", OWN_ONLY, "answers ARP"),
            ("arp_announce", BEST_OWN, "sends ARP requests"),
        ):
            enough = (sysctl.read(f"net/ipv4/conf/all/{setting}") or "0") >= recommended
            harmful = partial(_less, minimum=recommended, enough=enough)
            made.append(
                SysctlRequirement(
                    f"net/ipv4/conf/{name}/{setting}", harmful, recommended, why.format(what)
                )
            )
    return tuple(made)


def _less(own: str, *, minimum: str, enough: bool) -> bool:
    return not enough and own < minimum


def requirements_of(
    arrivals: Collection[str], answers: Collection[str], *, everywhere: str
) -> tuple[SysctlRequirement, ...]:
    """Return the requirements on reverse path filtering. Pure. The kernel uses the greater of the
    interface's own value and the value of `all`, so setting the interface to loose is always
    enough."""

    def is_strict(own: str) -> bool:
        return max(own, everywhere) == STRICT

    why = (
        "clients' packets arrive at this interface, but are answered through another one: strict "
        "reverse path filtering drops them"
    )
    lonely = [name for name in arrivals if answers and name not in answers]
    return tuple(
        SysctlRequirement(f"net/ipv4/conf/{name}/rp_filter", is_strict, LOOSE, why)
        for name in lonely
    )
