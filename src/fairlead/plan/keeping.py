"""How many addresses a namespace may keep for Services that are gone, and for how long.

In: a kept holder of an AddressGrant, the namespace, the limits of the configuration, the time. Out:
why the address is not, or no longer, kept. Pure. Invariant: an address that no Service can get
back, or that counts towards no quota, does not stay locked for ever."""

from datetime import UTC, datetime, timedelta

from fairlead.config import Config
from fairlead.kube.crds import Holder
from fairlead.kube.objects import Namespace
from fairlead.model import Value
from fairlead.plan.annotations import KEEP_ADDRESS

NOT_KEPT = "AddressNotKept"
SKEW = timedelta(minutes=10)
"""How far the clock of the controller may differ from that of the API server."""
_STAMP = "%Y-%m-%dT%H:%M:%SZ"


class KeepLimits(Value, frozen=True):
    """`days` 0: there is no time limit."""

    per_namespace: int
    days: float

    def until(self, since: str) -> str:
        """When an address becomes free that is kept since this time; empty: never, or the time is
        not known."""
        begun = _read(since)
        try:
            return (
                (begun + timedelta(days=self.days)).strftime(_STAMP)
                if begun is not None and self.days
                else ""
            )
        except OverflowError:
            return ""


def limits_of(config: Config) -> KeepLimits:
    return KeepLimits(
        config.controller.kept_addresses_per_namespace, config.controller.kept_address_days
    )


def exceeded(namespace: str, kept: int, limits: KeepLimits) -> str:
    """Why one more address is not kept for this namespace, which keeps `kept` already; empty: it is
    kept."""
    if kept < limits.per_namespace:
        return ""
    return (
        f"kept addresses of namespace {namespace}: {kept} of {limits.per_namespace}; release one "
        "that is not needed "
        "(kubectl get addressgrants, kubectl delete addressgrant NAME), or raise "
        "controller.keptAddressesPerNamespace; "
        f"without annotation {KEEP_ADDRESS[0]} an address is free when its Service is deleted"
    )


def lapsed(holder: Holder, namespace: Namespace | None, limits: KeepLimits, now: datetime) -> str:
    """Why the address is no longer kept for this holder; empty: it still is. `namespace`: of the
    holder, None if it is gone."""
    if namespace is None:
        return f"namespace {holder.namespace} is gone"
    if namespace.metadata.deletion_timestamp is not None:
        return f"namespace {holder.namespace} is being deleted"
    since, created = _read(holder.kept_since), _read(namespace.metadata.creation_timestamp or "")
    if since is not None and created is not None and created > since + SKEW:
        return f"namespace {holder.namespace} was deleted and created again"
    end = _read(limits.until(holder.kept_since))
    if end is not None and now >= end:
        return f"it was kept for {limits.days:g} days"
    return ""


def _read(text: str) -> datetime | None:
    try:
        return datetime.strptime(text, _STAMP).replace(tzinfo=UTC)
    except ValueError:
        return None
