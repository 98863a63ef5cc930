"""The announcement of addresses by BGP, through a BIRD on the host of the gateway.

- `spec`: the addresses of Services as values, and the changes between them.
- `render`: the configuration of BIRD.
- `sessions`: what BIRD tells about its sessions, as findings and as a part of `/state`.
- `driver`: routes in a kernel table, which BIRD reads; the configuration; the watch over BIRD."""

from fairlead.drivers.bgp.driver import BgpDriver, NoBgp

__all__ = ["BgpDriver", "NoBgp"]
