"""The driver of the conditions of Services, which show the result of each request on the object
itself, for readers who do not read Events.

In: conditions by Service. Out: `status.conditions`, a list keyed by type. The driver owns the types
of Fairlead's domain and leaves other types alone. A Service that Fairlead no longer serves loses
these conditions. Invariants: the field manager is used for nothing else; `lastTransitionTime`
changes only when `status` does."""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from fairlead.drivers import Component
from fairlead.drivers.mutation_cache import ServiceCache
from fairlead.drivers.service_status import ServiceWriter
from fairlead.kube.events import stamp
from fairlead.kube.objects import Condition, Service
from fairlead.model import Outcome, ServiceKey
from fairlead.plan.status import CONDITION_TYPES, ConditionStatus, ServiceCondition

FIELD_MANAGER = "fairlead-conditions"


class Conditions(msgspec.Struct, frozen=True):
    """The conditions on the Service with this uid, sorted."""

    uid: str
    conditions: tuple[ServiceCondition, ...]


class ShowConditions(msgspec.Struct, frozen=True):
    """Show exactly these conditions. An empty tuple removes all conditions of Fairlead."""

    service: ServiceKey
    uid: str
    conditions: tuple[ServiceCondition, ...]

    def __str__(self) -> str:
        words = (
            ", ".join(f"{each.type}={each.status} ({each.reason})" for each in self.conditions)
            or "none"
        )
        return f"show conditions of Service {self.service}: {words}"


class ConditionsDriver(Component):
    """Driver of `status.conditions`."""

    name = "conditions"
    batch = 1

    def __init__(
        self,
        writer: ServiceWriter,
        services: ServiceCache,
        *,
        undecided: Callable[[Service], bool] = lambda _: False,
    ) -> None:
        """`undecided`: whether it is too early to decide what a Service should show; its conditions
        are then left unchanged."""
        self._undecided = undecided
        self._writer = writer
        self._services = services

    def render(self, intents: Mapping[ServiceKey, Conditions]) -> Mapping[ServiceKey, Conditions]:
        return intents

    def diff(
        self, desired: Mapping[ServiceKey, Conditions], actual: Mapping[ServiceKey, Conditions]
    ) -> Sequence[ShowConditions]:
        shown = [
            ShowConditions(key, each.uid, each.conditions)
            for key, each in desired.items()
            if actual.get(key) != each
        ]
        return [
            *shown,
            *(
                ShowConditions(key, each.uid, ())
                for key, each in actual.items()
                if key not in desired
            ),
        ]

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Conditions]:
        """Return Fairlead's conditions on the Services, as the watch or the last write of this
        process shows them."""
        actual = {}
        for key, service in self._services.of(keys).items():
            if self._undecided(service):
                continue
            if found := tuple(
                sorted(
                    _shown_condition(each)
                    for each in service.status.conditions
                    if each.type in CONDITION_TYPES
                )
            ):
                actual[key] = Conditions(service.metadata.uid, found)
        return actual

    async def apply(self, changes: Sequence[ShowConditions]) -> Mapping[ServiceKey, Outcome]:
        for change in changes:
            now = stamp(datetime.now(UTC))
            services = self._services.of([change.service]).values()
            before = {each.type: each for service in services for each in service.status.conditions}
            status = {
                "conditions": [
                    _body(each, before.get(each.type), now) for each in change.conditions
                ]
            }
            await self._writer.apply(
                change.service,
                change.uid,
                field_manager=FIELD_MANAGER,
                status=status if change.conditions else None,
            )
        return {}


def _shown_condition(condition: Condition) -> ServiceCondition:
    # Another client may have written any text as the status. Such a text only has to differ from
    # the desired status, so "Unknown" stands for it.
    status: ConditionStatus = (
        "True"
        if condition.status == "True"
        else "False"
        if condition.status == "False"
        else "Unknown"
    )
    return ServiceCondition(condition.type, status, condition.reason, condition.message)


def _body(condition: ServiceCondition, before: Condition | None, now: str) -> Mapping[str, str]:
    kept = (
        before.last_transition_time
        if before is not None and before.status == condition.status
        else None
    )
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message,
        "lastTransitionTime": kept or now,
    }
