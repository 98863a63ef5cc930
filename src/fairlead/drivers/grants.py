"""The driver of AddressGrants: the locks on addresses, one object for each granted address.

In: LoadBalancers with their grants. Out: AddressGrants that name the Service and its ports, and the
precondition under which `drivers.publish` may publish addresses. The driver comes after the claim
and before the publication. A grant is removed after its address is no longer published.

Invariant: no two Services ever show the same port of an address, whatever the number of controllers
and the order in which their calls arrive. The invariant follows from these rules, each of which the
API server enforces through the version of an object:

- An AddressGrant is created (409 if it exists), or is changed or deleted on condition that it still
  has the version that was read.
- A port is published by a write that is conditional on the version of the Service for which its
  entry in the grant was written (`serviceVersion`), or on a version that shows the port already.
- A port is removed from a grant only when the Service is gone, or when a version of the Service
  later than `serviceVersion` does not show the port. Then a write that is conditional on the older
  version can no longer succeed, and a later write needs the grant again."""

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import structlog

from fairlead.drivers import Component
from fairlead.drivers.grant_cache import GrantCache
from fairlead.drivers.kept_addresses import KeptAddresses
from fairlead.drivers.mutation_cache import ServiceCache
from fairlead.drivers.service_status import ServiceWriter
from fairlead.errors import Conflict, Unavailable
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.crds import ADDRESS_GRANTS, AddressGrant, AddressGrantSpec, grant_name
from fairlead.kube.objects import SERVICES, LoadBalancerIngress, ObjectMeta, Service
from fairlead.model import Grant, LoadBalancer, Outcome, ServiceKey
from fairlead.plan import locks
from fairlead.plan.addresses import keeps, ports_of, shown_address, shown_by
from fairlead.plan.locks import PublishedVersion

log = structlog.get_logger()

FIELD_MANAGER = "fairlead-grants"
RELEASING_ANNOTATION = "fairlead.io/releasing"

NO_LOCKS = (
    "the CRD AddressGrant, the lock on addresses, is not installed: no address is granted until "
    "it is"
)
INSTALL = "install Fairlead's CRDs: kubectl apply --server-side -f deploy/crds"


class Granted(msgspec.Struct, frozen=True):
    """The grants that a Service should have."""

    uid: str
    grants: tuple[Grant, ...]


class Held(msgspec.Struct, frozen=True):
    """The grants that name a Service.

    - `published`: the version of the Service; None if there is no Service of this name.
    - `expired`: why addresses are no longer kept for it, by address.
    - `without_date`: kept addresses without a record of the time since which they are kept."""

    published: PublishedVersion | None
    grants: tuple[AddressGrant, ...]
    expired: Mapping[str, str] = {}
    without_date: frozenset[str] = frozenset()


class AddHolder(msgspec.Struct, frozen=True):
    """Grant an address with certain ports to a Service."""

    service: ServiceKey
    uid: str
    grant: Grant

    def __str__(self) -> str:
        return f"grant {self.grant.address} {','.join(self.grant.ports)} to Service {self.service}"


class RemoveHolder(msgspec.Struct, frozen=True):
    """Remove a Service from the grant of an address. With `leave`, remove only its ports that are
    not in `leave`."""

    service: ServiceKey
    address: str
    leave: Grant | None = None

    def __str__(self) -> str:
        return f"revoke the grant of {self.address} to Service {self.service}"


class FreeKeptAddress(msgspec.Struct, frozen=True):
    """Free an address that is kept for a deleted Service."""

    service: ServiceKey
    address: str
    why: str

    def __str__(self) -> str:
        return f"stop keeping {self.address} for Service {self.service}: {self.why}"


class RecordKeptSince(msgspec.Struct, frozen=True):
    """Record the present time as the time since which an address is kept."""

    service: ServiceKey
    address: str

    def __str__(self) -> str:
        return f"record since when {self.address} is kept for Service {self.service}"


Change = AddHolder | RemoveHolder | FreeKeptAddress | RecordKeptSince


class GrantDriver(Component):
    """Driver of AddressGrants."""

    name = "grants"
    batch = 1

    def __init__(
        self,
        client: Client,
        writer: ServiceWriter,
        services: ServiceCache,
        grants: GrantCache,
        kept_addresses: KeptAddresses,
        *,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        """`fence` is called before each write, and raises if this process is no longer the
        leader."""
        self._client = client
        self._writer = writer
        self._services = services
        self._grants = grants
        self._kept = kept_addresses
        self._dates_are_kept = True
        """Whether the API server stores `keptSince`. An older version of the CRD lacks the
        field."""
        self._fence = fence

    def render(self, intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, Granted]:
        return {key: Granted(intent.uid, intent.grants) for key, intent in intents.items()}

    def diff(
        self, desired: Mapping[ServiceKey, Granted], actual: Mapping[ServiceKey, Held]
    ) -> Sequence[Change]:
        changes: list[Change] = []
        for key in sorted(desired.keys() | actual.keys()):
            wanted = desired.get(key, Granted("", ()))
            held = actual.get(key, Held(None, ()))
            present = {grant.spec.address: grant for grant in held.grants}
            for grant in wanted.grants:
                known = present.pop(grant.address, None)
                if known is None or not locks.settled(
                    known.spec, key, wanted.uid, grant, held.published
                ):
                    changes.append(AddHolder(key, wanted.uid, grant))
                if known is None or not locks.surplus(known.spec, key, grant):
                    continue
                if not locks.shows_surplus(known.spec, key, grant, held.published):
                    changes.append(RemoveHolder(key, grant.address, grant))
            for address, known in present.items():
                # An address that the Service still shows keeps its grant until `publish`, the next
                # driver, has removed it from the status.
                shown = (
                    key in desired
                    and held.published is not None
                    and bool(held.published.shown.get(address))
                )
                if locks.is_kept(known.spec, key):
                    if address in held.expired:
                        changes.append(FreeKeptAddress(key, address, held.expired[address]))
                    elif address in held.without_date:
                        changes.append(RecordKeptSince(key, address))
                elif not shown:
                    changes.append(RemoveHolder(key, address))
        return changes

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Held]:
        """Return the grants as the watch or the last write of this process shows them. That
        suffices, because the API server checks the version when a grant is written."""
        if keys is None:
            self._services.forget_answers()
            self._grants.forget_answers()
        services = self._services.of(keys)
        held = {}
        for key in self._grants.holders() | services.keys() if keys is None else keys:
            service, grants = services.get(key), self._grants.of(key)
            kept = {
                grant.spec.address: holder
                for grant in grants
                if (holder := grant.holder(key)) and not holder.uid
            }
            expired = {
                address: why
                for address, holder in kept.items()
                if (why := self._kept.expired(holder))
            }
            without_date = frozenset(
                address
                for address, holder in kept.items()
                if self._dates_are_kept and not holder.kept_since
            )
            # Kept addresses of a deleted Service need no change unless one has expired or has no
            # date.
            if grants and (
                service is not None or len(kept) < len(grants) or expired or without_date
            ):
                held[key] = Held(published_version_of(service), grants, expired, without_date)
            elif service is not None and key in services:
                held[key] = Held(published_version_of(service), ())
        return held

    async def apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        if self._grants.absent:
            raise Unavailable(NO_LOCKS, fix=INSTALL)
        for change in changes:
            match change:
                case AddHolder():
                    await self._add_holder(change)
                case RemoveHolder():
                    await self._remove_holder(change)
                case FreeKeptAddress():
                    await self._free_kept(change)
                case RecordKeptSince():
                    await self._date_kept(change)
        return {}

    def granted(self, key: ServiceKey) -> Collection[str]:
        """Return the addresses that are granted to this Service."""
        return {grant.spec.address for grant in self._grants.of(key)}

    def publish_precondition(
        self, key: ServiceKey, uid: str, ingress: Sequence[LoadBalancerIngress]
    ) -> str:
        """Return the version of the Service on which the write of `ingress` is conditional. Raise
        Conflict if a port of `ingress` is not granted for this version, or if the Service was
        recreated."""
        service = self._services.of([key]).get(key)
        if service is None or service.metadata.uid != uid:
            raise Conflict(f"Service {key} was deleted or recreated")
        shown = shown_by(service)
        for entry in ingress:
            address = shown_address(entry) or entry.ip
            grant = self._grants.named(grant_name(address))
            allowed = shown.get(address, frozenset()) | locks.publishable_ports(
                grant.spec if grant is not None else None,
                key,
                uid,
                service.metadata.resource_version,
            )
            # An entry without ports stands for all ports of the Service.
            requested = {
                f"{port.protocol}/{port.port}" for port in entry.ports if port.error is None
            }
            if missing := (requested if entry.ports else ports_of(service)) - allowed:
                ports, version = ", ".join(sorted(missing)), service.metadata.resource_version
                raise Conflict(
                    f"{address} {ports} is not granted for version {version} of Service {key}"
                )
        return service.metadata.resource_version

    async def _add_holder(self, change: AddHolder) -> None:
        key, address = change.service, change.grant.address
        service = self._services.of([key]).get(key)
        published = published_version_of(service)
        if published is None or published.uid != change.uid:
            raise Conflict(f"Service {key} was deleted or recreated")
        known = self._grants.named(grant_name(address))
        if known is None:
            spec = locks.with_holder(AddressGrantSpec(address), key, change.grant, published)
            self._fence()
            made = AddressGrant(ObjectMeta(name=grant_name(address)), spec)
            try:
                self._grants.note(await self._client.create(ADDRESS_GRANTS, made))
            except Conflict:
                await self._check_lock(made)
                raise
            return
        former = known.holder(key)
        if former is not None and former.uid not in ("", change.uid):
            await self._check_gone(key, former.uid)
        await self._replace(known, locks.with_holder(known.spec, key, change.grant, published))

    async def _remove_holder(self, change: RemoveHolder) -> None:
        key = change.service
        known = self._grants.named(grant_name(change.address))
        holder = known.holder(key) if known is not None else None
        if known is None or holder is None:
            return
        service = self._services.of([key]).get(key)
        published = published_version_of(service)
        if published is None or published.uid != holder.uid:
            if holder.uid:
                await self._check_gone(key, holder.uid)
            keep = known.spec.keep
        else:
            if locks.may_be_published(published, holder):
                published = await self._bump_version(key, published)
            if not locks.releasable(published, holder, change.address, change.leave):
                raise Conflict(f"Service {key} still shows {change.address}")
            keep = service is not None and keeps(service)
        if not keep or change.leave is not None:
            await self._write(
                known, locks.without_holder(known.spec, key, change.leave, keep=False)
            )
            return
        async with self._kept.deciding:
            keep = await self._kept.may_keep(key, holder.uid, known)
            await self._write(
                known,
                locks.without_holder(known.spec, key, None, keep=keep, since=self._kept.since),
            )

    async def _free_kept(self, change: FreeKeptAddress) -> None:
        known = self._grants.named(grant_name(change.address))
        holder = known.holder(change.service) if known is not None else None
        if known is None or holder is None or holder.uid:
            return
        await self._kept.check_expired(holder)
        await self._write(known, locks.without_holder(known.spec, change.service, None, keep=False))
        log.info(
            "address is no longer kept",
            address=change.address,
            service=str(change.service),
            why=change.why,
        )

    async def _date_kept(self, change: RecordKeptSince) -> None:
        """Record the time since which the address is kept. An API server whose CRD lacks the field
        drops it without an error; in that case log a warning and do not try again."""
        known = self._grants.named(grant_name(change.address))
        if known is None:
            return
        await self._replace(
            known, locks.with_kept_since(known.spec, change.service, self._kept.since)
        )
        written = self._grants.named(grant_name(change.address))
        if (
            written is not None
            and (holder := written.holder(change.service))
            and not holder.uid
            and not holder.kept_since
        ):
            self._dates_are_kept = False
            why = "the CRD AddressGrant is older than this controller"
            log.warning(f"addresses are kept without a time limit: {why}", fix=INSTALL)

    async def _write(self, known: AddressGrant, spec: AddressGrantSpec) -> None:
        """Write the grant, or delete it if it has no holders."""
        if spec.holders:
            await self._replace(known, spec)
            return
        self._fence()
        try:
            meta = known.metadata
            await self._client.delete(
                ADDRESS_GRANTS, ("", meta.name), uid=meta.uid, version=meta.resource_version
            )
        except NotFound:
            pass
        self._grants.note_deletion(known)

    async def _replace(self, known: AddressGrant, spec: AddressGrantSpec) -> None:
        if spec == known.spec:
            return
        self._fence()
        try:
            answer = await self._client.replace(
                ADDRESS_GRANTS, ("", known.metadata.name), AddressGrant(known.metadata, spec)
            )
        except NotFound:
            self._grants.note_deletion(known)
            raise Conflict(f"AddressGrant {known.metadata.name} was deleted") from None
        self._grants.note(answer)

    async def _check_lock(self, wanted: AddressGrant) -> None:
        """Check an AddressGrant that another process has created. Raise Unavailable if it has the
        name of the lock but is not a lock on the address: it prevents the creation of the lock
        until a user deletes it."""
        name = wanted.metadata.name
        try:
            found = await self._client.get(ADDRESS_GRANTS, ("", name))
        except NotFound:
            return
        if not found.is_lock:
            raise Unavailable(
                f"AddressGrant {name} should be the lock on {wanted.spec.address}, but it names "
                f"{found.spec.address!r}",
                fix=f"delete it with `kubectl delete addressgrant {name}`; it is then recreated",
            )

    async def _check_gone(self, key: ServiceKey, uid: str) -> None:
        """Query the API server whether the Service is gone, because the watch may lag behind. Raise
        Conflict if the Service with this uid exists."""
        try:
            found = await self._client.get(SERVICES, key)
        except NotFound:
            return
        if found.metadata.uid == uid:
            raise Conflict(f"Service {key} exists, but the watch has not shown it yet")

    async def _bump_version(self, key: ServiceKey, published: PublishedVersion) -> PublishedVersion:
        """Create a new version of the Service, and return that version. A write that is conditional
        on the version for which the grant was written can then no longer succeed.

        This is necessary if a Service is released before anything was published on it, and no other
        change has made a new version. An annotation is written and removed again."""
        marked = {"annotations": {RELEASING_ANNOTATION: str(published.version)}}
        for metadata in (marked, None):
            await self._writer.apply(
                key, published.uid, field_manager=FIELD_MANAGER, metadata=metadata
            )
        return published_version_of(self._services.of([key]).get(key)) or published


def published_version_of(service: Service | None) -> PublishedVersion | None:
    """Return the known version of the Service, with the ports that it shows."""
    if service is None:
        return None
    return PublishedVersion(service.metadata.uid, service.metadata.version, shown_by(service))
