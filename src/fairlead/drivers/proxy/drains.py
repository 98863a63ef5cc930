"""When each drained server stopped getting new connections, and which servers have exceeded their
drain time.

In: the specs before and after each change. Out: the servers whose connections are to be closed. No
I/O: the time is an argument. A server is identified by its section and node, because old workers
have it under the same name. The times are not persistent: they begin again when this process
restarts."""

from collections.abc import Mapping

from fairlead.drivers.proxy.render import section_name
from fairlead.drivers.proxy.spec import ProxySpec
from fairlead.model import ServiceKey
from fairlead.plan.serving import is_drained

ServerKey = tuple[str, str]
"""A server: its section and node."""


class Drains:
    """The drained servers of the running HAProxy. The driver updates them."""

    def __init__(self) -> None:
        self._since: dict[ServerKey, tuple[ServiceKey, float]] = {}

    def update(
        self,
        before: Mapping[ServiceKey, ProxySpec],
        now: Mapping[ServiceKey, ProxySpec],
        now_s: float,
    ) -> None:
        """Record the change from the specs `before` to the specs `now`."""
        known, active = (
            _servers(before) | _servers(now),
            {key for key, one in _servers(now).items() if one[1]},
        )
        for key, (service, _) in known.items():
            if key in active or service not in now:
                self._since.pop(key, None)
            else:
                self._since.setdefault(key, (service, now_s))

    def expired(self, specs: Mapping[ServiceKey, ProxySpec], now_s: float) -> list[ServerKey]:
        """Return the servers whose connections are to be closed now. Each is returned once."""
        found = []
        for key, (service, since_s) in sorted(self._since.items()):
            limit_s = specs[service].drain_s if service in specs else 0.0
            if is_drained(now_s - since_s, limit_s):
                del self._since[key]
                found.append(key)
        return found


def _servers(specs: Mapping[ServiceKey, ProxySpec]) -> dict[ServerKey, tuple[ServiceKey, int]]:
    """Return the Service and the weight of each server."""
    return {
        (section_name(service, each.listener.key), server.node): (service, server.weight)
        for service, one in specs.items()
        for each in one.listeners
        for server in each.servers
    }
