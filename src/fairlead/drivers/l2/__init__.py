"""Layer 2 announcement: one host of a link answers ARP requests and neighbor solicitations for each
address (`ownership`), and another one takes over when that host is lost.

`driver` is the role's side, `process` the announcing process, bpf/neighbors.bpf.c the kernel's."""

from fairlead.drivers.l2.driver import L2Driver
from fairlead.drivers.l2.removal import NoL2, remove_l2

__all__ = ["L2Driver", "NoL2", "remove_l2"]
