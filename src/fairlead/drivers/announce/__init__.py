"""The driver that announces load-balancer addresses on layer 2.

- `driver`: keeps what this gateway announces equal to the plan.
- `spec`: its specs and changes.
- `responder`: answers requests for owned addresses, by a program in the kernel.
- `groups`: joins the multicast groups in which neighbors ask for IPv6 addresses.
- `maps`: the pinned maps of the program.
- `gratuitous`: announces owned addresses by gratuitous ARP and neighbor advertisements.
- `schedule`: when each address is announced.
- `succession`: what it does when another gateway is lost, or takes over.
- `conflicts`: addresses that other stations use as well.
- `steadiness`: which links have only just returned.
- `metrics`: addresses and requests."""

from fairlead.drivers.announce.driver import AnnounceDriver, NoAnnouncement

__all__ = ["AnnounceDriver", "NoAnnouncement"]
