"""Since when which servers get nothing new, and whose time to keep connections is over.

In: what was there and what is, at each change. Out: servers whose connections are to be ended. Pure
but for what it remembers. A server is known by its section and node: workers of before a reload
have it by the same name. A start begins the time anew."""

from collections.abc import Mapping

from fairlead.drivers.proxy.render import section_name
from fairlead.drivers.proxy.spec import ProxySpec
from fairlead.model import ServiceKey
from fairlead.plan.serving import is_drained

Place = tuple[str, str]
"""Section and node."""


class Drains:
    """Kept by the driver."""

    def __init__(self) -> None:
        self._since: dict[Place, tuple[ServiceKey, float]] = {}

    def settle(
        self,
        before: Mapping[ServiceKey, ProxySpec],
        now: Mapping[ServiceKey, ProxySpec],
        now_s: float,
    ) -> None:
        """This was there, and that is."""
        known, active = (
            _places(before) | _places(now),
            {place for place, one in _places(now).items() if one[1]},
        )
        for place, (service, _) in known.items():
            if place in active or service not in now:
                self._since.pop(place, None)
            else:
                self._since.setdefault(place, (service, now_s))

    def expired(self, specs: Mapping[ServiceKey, ProxySpec], now_s: float) -> list[Place]:
        """Those whose connections are to be ended now. They are told once."""
        found = []
        for place, (service, since_s) in sorted(self._since.items()):
            limit_s = specs[service].drain_s if service in specs else 0.0
            if is_drained(now_s - since_s, limit_s):
                del self._since[place]
                found.append(place)
        return found


def _places(specs: Mapping[ServiceKey, ProxySpec]) -> dict[Place, tuple[ServiceKey, int]]:
    """With the Service and the weight."""
    return {
        (section_name(service, each.listener.key), server.node): (service, server.weight)
        for service, one in specs.items()
        for each in one.listeners
        for server in each.servers
    }
