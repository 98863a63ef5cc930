"""Limits of kept addresses: how many a namespace may keep for deleted Services, and how long.

In: the holder of a kept address in an AddressGrant, the namespace, the limits of the configuration,
the time. Out: the reason why the address is not, or no longer, kept. Pure. Invariant: an address
does not stay reserved forever if no Service can get it back, or if it counts towards no quota."""

from datetime import UTC, datetime, timedelta

from fairlead.config import Config
from fairlead.kube.crds import Holder
from fairlead.kube.objects import Namespace
from fairlead.model import Value
from fairlead.plan.annotations import KEEP_ADDRESS

NOT_KEPT = "AddressNotKept"
SKEW = timedelta(minutes=10)
"""Tolerated difference between the clocks of the controller and of the API server."""
_STAMP = "%Y-%m-%dT%H:%M:%SZ"


class KeptAddressLimits(Value, frozen=True):
    """The limits of kept addresses. `days`: how long an address is kept; 0: without limit."""

    per_namespace: int
    days: float

    def until(self, since: str) -> str:
        """Return when an address that has been kept since this time becomes free; empty: never, or
        `since` is unknown."""
        begun = _read(since)
        try:
            return (
                (begun + timedelta(days=self.days)).strftime(_STAMP)
                if begun is not None and self.days
                else ""
            )
        except OverflowError:
            return ""


def limits_of(config: Config) -> KeptAddressLimits:
    return KeptAddressLimits(
        config.controller.kept_addresses_per_namespace, config.controller.kept_address_days
    )


def exceeded(namespace: str, kept: int, limits: KeptAddressLimits) -> str:
    """Return why a namespace that keeps `kept` addresses may not keep another one; empty: it
    may."""
    if kept < limits.per_namespace:
        return ""
    return (
        f"kept addresses of namespace {namespace}: {kept} of {limits.per_namespace}; release one "
        "that is not needed (kubectl get addressgrants, kubectl delete addressgrant NAME), or "
        "raise controller.keptAddressesPerNamespace; without the annotation "
        f"{KEEP_ADDRESS[0]}, an address becomes free when its Service is deleted"
    )


def expired(
    holder: Holder, namespace: Namespace | None, limits: KeptAddressLimits, now: datetime
) -> str:
    """Return why the address is no longer kept for this holder; empty: it is still kept.
    `namespace`: the namespace of the holder; None if it does not exist."""
    if namespace is None:
        return f"namespace {holder.namespace} does not exist"
    if namespace.metadata.deletion_timestamp is not None:
        return f"namespace {holder.namespace} is being deleted"
    since, created = _read(holder.kept_since), _read(namespace.metadata.creation_timestamp or "")
    if since is not None and created is not None and created > since + SKEW:
        return f"namespace {holder.namespace} was deleted and recreated"
    end = _read(limits.until(holder.kept_since))
    if end is not None and now >= end:
        return f"it was kept for {limits.days:g} days"
    return ""


def _read(text: str) -> datetime | None:
    try:
        return datetime.strptime(text, _STAMP).replace(tzinfo=UTC)
    except ValueError:
        return None
