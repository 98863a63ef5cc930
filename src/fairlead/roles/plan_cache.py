"""The plan of a gateway, most of which is computed once for both of its loops.

In: a State, the Services to plan. Out: their LoadBalancers, with members as the API shows them
(`unconfirmed`), or as probes have confirmed them (`confirmed`). The part that depends only on
objects is cached until the State reports a change of these objects. So an event is planned once,
and a new verdict costs only the confirmation of the members. Invariant: the result equals that of a
complete new plan."""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.kube.objects import Service
from fairlead.model import Announcement, LoadBalancer, ServiceKey
from fairlead.plan.addresses import held_by
from fairlead.plan.announce import (
    Announcers,
    announcements_at,
    announcements_of,
    announcers_of,
    refusing_at,
)
from fairlead.plan.balancer import Unconfirmed, confirmed
from fairlead.plan.cluster import plan_gateway_unconfirmed
from fairlead.state import State


class PlanCache:
    """A cache of plans. It subscribes to the State, which marks the Services to plan again."""

    def __init__(self, state: State, config: Config) -> None:
        self._state = state
        self._config = config
        self._cached: dict[ServiceKey, Unconfirmed | Refused] = {}
        self._refused: set[ServiceKey] = set()
        """The Services whose last plan was refused."""
        state.objects_only.subscribers.add(self)

    def mark(self, keys: Iterable[ServiceKey]) -> None:
        """Remove Services from the cache, because objects on which they depend have changed."""
        for key in keys:
            self._cached.pop(key, None)

    def unconfirmed(
        self, keys: Collection[ServiceKey]
    ) -> Mapping[ServiceKey, LoadBalancer | Refused]:
        """Return the plan of the loop that probes: which nodes are members does not depend on the
        results of probes."""
        plans = self._plans_of(keys)
        return {
            key: each if isinstance(each, Refused) else each.balancer for key, each in plans.items()
        }

    def confirmed(
        self, keys: Collection[ServiceKey]
    ) -> Mapping[ServiceKey, LoadBalancer | Refused]:
        """Return the plan of the loop that forwards, with members as the probes of this gateway
        have confirmed them, and with the owners of announced addresses."""
        announcers = self._announcers()
        return {
            key: each
            if isinstance(each, Refused)
            else self._announced(self._confirmed(each), announcers)
            for key, each in self._plans_of(keys).items()
        }

    def _confirmed(self, plans: Unconfirmed) -> LoadBalancer:
        """Confirm the members by the verdicts for the path of their traffic: the routes of this
        host if the gateway ends connections, otherwise the path of forwarded packets, which may be
        a tunnel."""
        state = self._state
        if plans.balancer.terminates_connections:
            return confirmed(plans, state.routed_verdict_of)
        return confirmed(plans, state.verdict_of, state.tunnels)

    def announced_although_refused(self) -> Mapping[ServiceKey, tuple[Announcement, ...]]:
        """Return who announces the addresses of the Services whose plan is refused. They are served
        in their previous form, so their addresses must stay reachable, also if the gateway restarts
        or their owner is lost."""
        state, announcers = self._state, self._announcers()
        if announcers is None:
            return {}
        return {
            service.key: announcements_at(
                [each for each in held_by(service) if state.exclusions.host_at(each) is None],
                announcers,
                self._refusing_at,
            )
            for service in self._refused_services()
        }

    def shown_although_refused(self) -> set[str]:
        """Return the addresses in the status of the Services whose plan is refused."""
        return {each for service in self._refused_services() for each in held_by(service)}

    def _refused_services(self) -> list[Service]:
        return [
            self._state.services[key]
            for key, each in self._plans_of(tuple(self._refused)).items()
            if isinstance(each, Refused) and key in self._state.services
        ]

    def _announcers(self) -> Announcers | None:
        """Return the gateways that may own addresses; None if they are not known, or none is
        announced."""
        state = self._state
        if self._config.announce.l2 is None or state.gateways is None:
            return None
        return announcers_of(state.gateways, state.nodes, state.silent)

    def _announced(self, balancer: LoadBalancer, announcers: Announcers | None) -> LoadBalancer:
        """Return the plan with the owners of its addresses. They are no part of the cached plan,
        which does not depend on the gateways."""
        if announcers is None:
            return balancer
        found = announcements_of(balancer, announcers, self._refusing_at)
        return msgspec.structs.replace(balancer, announcements=found) if found else balancer

    def _refusing_at(self, address: str) -> Collection[str]:
        gateways = self._state.gateways
        return refusing_at(gateways, self._state.showing(address)) if gateways is not None else ()

    def _plans_of(self, keys: Collection[ServiceKey]) -> Mapping[ServiceKey, Unconfirmed | Refused]:
        if new := [key for key in keys if key not in self._cached]:
            planned = plan_gateway_unconfirmed(self._state, self._config, new)
            self._cached.update(planned)
            self._refused.difference_update(new)
            self._refused |= {key for key, each in planned.items() if isinstance(each, Refused)}
        return {key: self._cached[key] for key in keys if key in self._cached}
