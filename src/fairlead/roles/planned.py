"""A gateway's plan, of which the greater part is made once for both of its loops.

In: a State, the Services to look at. Out: their LoadBalancers, on the API's word (`unconfirmed`) or
as probes have proved them (`confirmed`). What follows from objects alone is kept until the State
says that objects have changed which it may depend on: an event is planned once, and a verdict costs
no more than holding the members against it. Invariant: what is given out equals what planning anew
would give."""

from collections.abc import Collection, Iterable, Mapping

from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.model import LoadBalancer, ProxySettings, ServiceKey
from fairlead.plan.balancer import Unconfirmed, confirmed
from fairlead.plan.cluster import plan_gateway_unconfirmed
from fairlead.state import State


class Planned:
    """Has the State tell it what to forget."""

    def __init__(self, state: State, config: Config) -> None:
        self._state = state
        self._config = config
        self._told: dict[ServiceKey, Unconfirmed | Refused] = {}
        state.objects_only.subscribers.add(self)

    def mark(self, keys: Iterable[ServiceKey]) -> None:
        """Objects that these Services depend on have changed."""
        for key in keys:
            self._told.pop(key, None)

    def unconfirmed(
        self, keys: Collection[ServiceKey]
    ) -> Mapping[ServiceKey, LoadBalancer | Refused]:
        """The plan of the loop that probes: who is a member does not depend on what probes show."""
        told = self._known(keys)
        return {
            key: each if isinstance(each, Refused) else each.balancer for key, each in told.items()
        }

    def confirmed(
        self, keys: Collection[ServiceKey]
    ) -> Mapping[ServiceKey, LoadBalancer | Refused]:
        """Return the plan of the loop that forwards, with members as the probes of this gateway
        have confirmed them."""
        return {
            key: each if isinstance(each, Refused) else self._confirmed(each)
            for key, each in self._known(keys).items()
        }

    def _confirmed(self, told: Unconfirmed) -> LoadBalancer:
        """Confirm the members along the path of their traffic: the routes of this host if the
        gateway ends connections, and else the way of forwarded packets, which may be a tunnel."""
        state = self._state
        if isinstance(told.balancer.settings, ProxySettings):
            return confirmed(told, state.routed_verdict_of)
        return confirmed(told, state.verdict_of, state.tunnels)

    def _known(self, keys: Collection[ServiceKey]) -> Mapping[ServiceKey, Unconfirmed | Refused]:
        if new := [key for key in keys if key not in self._told]:
            self._told.update(plan_gateway_unconfirmed(self._state, self._config, new))
        return {key: self._told[key] for key in keys if key in self._told}
