"""The announcement of addresses by BGP.

- `driver`: announces through a BIRD of Fairlead's own, and watches its sessions.
- `routes`: hands addresses as kernel routes to the routing daemon that the operator runs.
- `spec`: the routes of each Service, and the route of each prefix.
- `peers`: which peers can be configured on a host.
- `render`: the configuration of BIRD.
- `speaker`, `process`: BIRD with its files, and its process.
- `watch`, `sessions`: the state of sessions, and what it means for a Service.
- `route_checks`, `route_prober`, `route_paths`: whether routers have the announced routes, which
  packets show.
- `removal`: removes everything, also what an earlier configuration left."""

from collections.abc import Callable, Sequence

from fairlead.announce_sections import BgpConfig
from fairlead.drivers import Requeue, Undecided, all_decided, no_requeue
from fairlead.drivers.bgp.driver import BirdDriver
from fairlead.drivers.bgp.peers import Peer
from fairlead.drivers.bgp.removal import NoBgp
from fairlead.drivers.bgp.routes import RoutesDriver

__all__ = ["BirdDriver", "NoBgp", "Peer", "RoutesDriver", "bgp_driver"]


def bgp_driver(
    section: BgpConfig,
    *,
    peers: Callable[[], Sequence[Peer]],
    requeue: Requeue = no_requeue,
    role: str = "gateway",
    host: str = "",
    undecided: Undecided = all_decided,
) -> BirdDriver | RoutesDriver:
    """Return the driver for the speaker of the section. `role`: `gateway` or `node`. `host`: the
    name of the host. `undecided`: see `drivers.Undecided`; BIRD's files name the Services."""
    if section.speaker == "routes":
        return RoutesDriver(section, requeue=requeue, role=role, undecided=undecided)
    return BirdDriver(section, peers=peers, requeue=requeue, role=role, host=host)
