"""What the service proxy requires of its host: space in the kernel's table of tracked flows.

In: the number of tracked flows. Out: a `SysctlRequirement`. Every flow through a node is one entry,
and a TCP connection remains one for two minutes after its end. When the table is full, the kernel
deletes flows that were never answered. If there are none, it drops the first packet of every new
flow ("nf_conntrack: table full, dropping packet" in its log). Therefore the limit should be raised
while half of the table is still free. The limit applies to all network namespaces of the machine,
and only the initial namespace can set it. Follows Linux
Documentation/networking/nf_conntrack-sysctl.rst."""

from fairlead.drivers.sysctl_requirement import SysctlRequirement
from fairlead.net import sysctl

COUNT, LIMIT = "net/netfilter/nf_conntrack_count", "net/netfilter/nf_conntrack_max"
_WHY = (
    "the kernel's table of tracked flows is more than half full: when it is full, the kernel drops "
    "the first packet of every new flow"
)


def requirements() -> tuple[SysctlRequirement, ...]:
    """Return the requirements for the present number of flows; none while no flow is tracked."""
    return requirements_of(int(sysctl.read(COUNT) or 0))


def requirements_of(flows: int) -> tuple[SysctlRequirement, ...]:
    """Return the requirements for this number of flows. Pure. The required limit is at least twice
    the number, rounded up to a power of two so that it does not change with every flow."""
    recommended = 1 << (2 * flows - 1).bit_length() if flows else 0
    return (
        (SysctlRequirement(LIMIT, lambda value: int(value) < 2 * flows, str(recommended), _WHY),)
        if flows
        else ()
    )
