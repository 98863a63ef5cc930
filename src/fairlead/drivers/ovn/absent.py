"""The driver for a configuration without OVN: it keeps the claims of Services that an earlier
configuration served by class ovn.

In: the claims. Out: a refusal to remove such a Service, or to change its class. Without it, the
address of the Service would be given to another one while a router of OVN still serves it."""

from collections.abc import Callable, Collection, Mapping, Sequence

from fairlead.drivers import Component
from fairlead.drivers.ovn.changes import Blocked
from fairlead.errors import FairleadError, Refused
from fairlead.model import LoadBalancer, Outcome, OvnSettings, ServiceKey

REFUSED = Refused(
    "this Service may still have load balancers in OVN, and section `ovn` is not in the "
    "configuration",
    fix="add the section again until the Service is released, or remove its finalizer",
)


class NoOvn(Component):
    """Implements fairlead.drivers.Driver."""

    name = "no ovn"
    batch = 1

    def __init__(self, claimed: Callable[[ServiceKey], bool]) -> None:
        """`claimed` returns whether class ovn has claimed the Service."""
        self._claimed = claimed

    def obstacle(self) -> FairleadError:
        """Return why rows cannot be removed: a Service with rows cannot change to another class."""
        return REFUSED

    def render(self, intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, bool]:
        """Return whether each Service is of class ovn."""
        return {key: isinstance(each.settings, OvnSettings) for key, each in intents.items()}

    def diff(
        self, desired: Mapping[ServiceKey, bool], actual: Mapping[ServiceKey, bool]
    ) -> Sequence[Blocked]:
        """Pure."""
        outcome = Outcome("refused", str(REFUSED))
        return [Blocked(key, outcome) for key in actual if not desired.get(key, False)]

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, bool]:
        """Return the Services among these that class ovn has claimed."""
        return {key: True for key in keys or () if self._claimed(key)}

    async def apply(self, changes: Sequence[Blocked]) -> Mapping[ServiceKey, Outcome]:
        """Return the refusals."""
        return {each.service: each.outcome for each in changes}
