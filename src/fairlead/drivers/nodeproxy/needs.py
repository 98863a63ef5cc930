"""What the service proxy needs of its host: room in the kernel's table of tracked flows.

In: how many flows are tracked. Out: a `Need`. Every flow through a node is one entry, a TCP
connection for two minutes after its end too. Where the table is full the kernel makes room by
forgetting flows that were never answered; finding none, it drops the packet that opens the next one
("nf_conntrack: table full, dropping packet" in its log). So it is to grow while half is free. The
limit is one for all network namespaces of the machine, and can be set in the first of them alone.
Follows Linux Documentation/networking/nf_conntrack-sysctl.rst."""

from fairlead.drivers.need import Need
from fairlead.net import sysctl

COUNT, LIMIT = "net/netfilter/nf_conntrack_count", "net/netfilter/nf_conntrack_max"
_WHY = (
    "more than half of the flows that the kernel can track are there: once it has no room, it "
    "drops who begins another"
)


def needs() -> tuple[Need, ...]:
    """The needs of this host as it is now. Where nothing is tracked yet there are none."""
    return needs_of(int(sysctl.read(COUNT) or 0))


def needs_of(flows: int) -> tuple[Need, ...]:
    """The same for so many flows. Pure. What should be is a power of two, twice as much at least:
    it is not another figure with every flow."""
    should = 1 << (2 * flows - 1).bit_length() if flows else 0
    return (Need(LIMIT, lambda value: int(value) < 2 * flows, str(should), _WHY),) if flows else ()
