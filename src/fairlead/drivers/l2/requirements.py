"""What layer 2 announcement requires of its host.

In: the interfaces, and the announced addresses. Out: `SysctlRequirement`s. The program at the
ingress answers and drops ARP requests before the host's stack sees them, so `arp_ignore` does not
matter. But if the host itself has an address, as with kube-proxy in IPVS mode, Linux may send its
own ARP requests from that address (ip-sysctl, arp_announce), and neighbors that hear them send to
this host, even if another host owns the address."""

from collections.abc import Collection

from fairlead.drivers.sysctl_requirement import SysctlRequirement
from fairlead.net import sysctl
from fairlead.net.localroutes import assigned_addresses

_BEST_OWN = "2"


def requirements(
    interfaces: Collection[str], addresses: Collection[str]
) -> tuple[SysctlRequirement, ...]:
    """Return the requirements for these interfaces."""
    assigned = {str(each) for each in assigned_addresses()}
    if not any(":" not in each for each in assigned.intersection(addresses)):
        return ()
    everywhere = sysctl.read("net/ipv4/conf/all/arp_announce") or "0"
    why = (
        "this host itself has announced addresses, and would use them as the source of its own ARP "
        "requests; other hosts would then send the traffic of these addresses to it"
    )

    def harmful(own: str) -> bool:
        return max(own, everywhere) < _BEST_OWN

    return tuple(
        SysctlRequirement(f"net/ipv4/conf/{name}/arp_announce", harmful, _BEST_OWN, why)
        for name in interfaces
    )
