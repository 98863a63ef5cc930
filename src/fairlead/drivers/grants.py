"""AddressGrants: the locks on addresses, one object for each address that is given.

In: LoadBalancers with their grants. Out: AddressGrants that name the Service and its ports; and the
licence for whoever publishes addresses. It comes after the claim and before the publication, and
goes after what was published is taken back.

Invariant: of all controllers, at whatever moments their calls arrive, no two ever show the same
port of an address on two Services. It rests on these rules, each of which a version of an object
enforces at the API server:
- An AddressGrant is created (409: it is there already), or changed and deleted over the version
  that was read.
- A port is published over exactly the version of the Service that its entry in the grant was
  written for
  (`serviceVersion`), or over a version that shows it already.
- A port is taken out of a grant only when the Service is gone, or when a version of it later than
  `serviceVersion` does not
  show the port: then no publication over the older version can still succeed, and a later one needs
  the grant again.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import structlog

from fairlead.drivers import Component
from fairlead.drivers.keeping import Keeping
from fairlead.drivers.newest import NewestServices
from fairlead.drivers.newest_grants import NewestGrants
from fairlead.drivers.service_status import ServiceWriter
from fairlead.errors import Conflict, Unavailable
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.crds import ADDRESS_GRANTS, AddressGrant, AddressGrantSpec, grant_name
from fairlead.kube.objects import SERVICES, LoadBalancerIngress, ObjectMeta, Service
from fairlead.model import Grant, LoadBalancer, Outcome, ServiceKey
from fairlead.plan import locks
from fairlead.plan.addresses import keeps, ports_of, shown_address, shown_by
from fairlead.plan.locks import Standing

log = structlog.get_logger()

FIELD_MANAGER = "fairlead-grants"
RELEASING_ANNOTATION = "fairlead.io/releasing"

NO_LOCKS = (
    "the API server does not know the kind AddressGrant, the lock on addresses: none is "
    "given until it does"
)
INSTALL = "install Fairlead's custom resources: kubectl apply --server-side -f deploy/crds"


class Granted(msgspec.Struct, frozen=True):
    """What a Service is to hold."""

    uid: str
    grants: tuple[Grant, ...]


class Held(msgspec.Struct, frozen=True):
    """What a Service holds. `standing`: None if there is no Service of this name. `lapsed`: why
    addresses are no longer kept for it; `undated`: addresses without a record since when they are
    kept."""

    standing: Standing | None
    grants: tuple[AddressGrant, ...]
    lapsed: Mapping[str, str] = {}
    undated: frozenset[str] = frozenset()


class Give(msgspec.Struct, frozen=True):
    service: ServiceKey
    uid: str
    grant: Grant

    def __str__(self) -> str:
        return f"grant {self.grant.address} {','.join(self.grant.ports)} to Service {self.service}"


class TakeBack(msgspec.Struct, frozen=True):
    """Take an address, or the ports that are not in `leave`, from a Service."""

    service: ServiceKey
    address: str
    leave: Grant | None = None

    def __str__(self) -> str:
        return f"take {self.address} back from Service {self.service}"


class EndKeeping(msgspec.Struct, frozen=True):
    """Free an address that is kept for a deleted Service."""

    service: ServiceKey
    address: str
    why: str

    def __str__(self) -> str:
        return f"stop keeping {self.address} for Service {self.service}: {self.why}"


class DateKeeping(msgspec.Struct, frozen=True):
    """Record the present time as the one since which an address is kept."""

    service: ServiceKey
    address: str

    def __str__(self) -> str:
        return f"record since when {self.address} is kept for Service {self.service}"


Change = Give | TakeBack | EndKeeping | DateKeeping


class GrantDriver(Component):
    """Driver of AddressGrants."""

    name = "grants"
    batch = 1

    def __init__(
        self,
        client: Client,
        writer: ServiceWriter,
        newest: NewestServices,
        grants: NewestGrants,
        keeping: Keeping,
        *,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        """`fence` is called before each write, and raises if it must not be made: we do not lead
        any more."""
        self._client = client
        self._writer = writer
        self._newest = newest
        self._grants = grants
        self._keeping = keeping
        self._dates_are_kept = True
        """Whether the API server stores `keptSince`: an older definition of AddressGrant does not
        have the field."""
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
            there = {grant.spec.address: grant for grant in held.grants}
            for grant in wanted.grants:
                known = there.pop(grant.address, None)
                if known is None or not locks.settled(
                    known.spec, key, wanted.uid, grant, held.standing
                ):
                    changes.append(Give(key, wanted.uid, grant))
                if known is None or not locks.surplus(known.spec, key, grant):
                    continue
                if not locks.shows_surplus(known.spec, key, grant, held.standing):
                    changes.append(TakeBack(key, grant.address, grant))
            for address, known in there.items():
                # What is still shown is taken back when `publish`, which comes next, has taken it
                # out of the status.
                shown = (
                    key in desired
                    and held.standing is not None
                    and bool(held.standing.shown.get(address))
                )
                if locks.is_kept(known.spec, key):
                    if address in held.lapsed:
                        changes.append(EndKeeping(key, address, held.lapsed[address]))
                    elif address in held.undated:
                        changes.append(DateKeeping(key, address))
                elif not shown:
                    changes.append(TakeBack(key, address))
        return changes

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Held]:
        """What is known: the API server tells of every change, and the lock is tried when it is
        taken."""
        if keys is None:
            self._newest.forget_answers()
            self._grants.forget_answers()
        services = self._newest.of(keys)
        held = {}
        for key in self._grants.holders() | services.keys() if keys is None else keys:
            service, grants = services.get(key), self._grants.of(key)
            kept = {
                grant.spec.address: holder
                for grant in grants
                if (holder := grant.holder(key)) and not holder.uid
            }
            lapsed = {
                address: why
                for address, holder in kept.items()
                if (why := self._keeping.lapsed(holder))
            }
            undated = frozenset(
                address
                for address, holder in kept.items()
                if self._dates_are_kept and not holder.kept_since
            )
            # One whose holder is long gone, and that is kept for it, is as it should be.
            if grants and (service is not None or len(kept) < len(grants) or lapsed or undated):
                held[key] = Held(standing_of(service), grants, lapsed, undated)
            elif service is not None and key in services:
                held[key] = Held(standing_of(service), ())
        return held

    async def apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        if self._grants.absent:
            raise Unavailable(NO_LOCKS, fix=INSTALL)
        for change in changes:
            match change:
                case Give():
                    await self._give(change)
                case TakeBack():
                    await self._take_back(change)
                case EndKeeping():
                    await self._end_keeping(change)
                case DateKeeping():
                    await self._date_keeping(change)
        return {}

    def granted(self, key: ServiceKey) -> Collection[str]:
        """The addresses that are locked for this Service."""
        return {grant.spec.address for grant in self._grants.of(key)}

    def licence(self, key: ServiceKey, uid: str, ingress: Sequence[LoadBalancerIngress]) -> str:
        """The version of the Service over which this may be published. Raises Conflict if it may
        not."""
        service = self._newest.of([key]).get(key)
        if service is None or service.metadata.uid != uid:
            raise Conflict(f"Service {key} is another one now")
        shown = shown_by(service)
        for entry in ingress:
            address = shown_address(entry) or entry.ip
            grant = self._grants.named(grant_name(address))
            allowed = shown.get(address, frozenset()) | locks.licensed(
                grant.spec if grant is not None else None,
                key,
                uid,
                service.metadata.resource_version,
            )
            # An entry that names no ports stands for all of them.
            asked = {f"{port.protocol}/{port.port}" for port in entry.ports if port.error is None}
            if missing := (asked if entry.ports else ports_of(service)) - allowed:
                ports, version = ", ".join(sorted(missing)), service.metadata.resource_version
                raise Conflict(
                    f"{address} {ports} is not granted for version {version} of Service {key}"
                )
        return service.metadata.resource_version

    async def _give(self, change: Give) -> None:
        key, address = change.service, change.grant.address
        service = self._newest.of([key]).get(key)
        standing = standing_of(service)
        if standing is None or standing.uid != change.uid:
            raise Conflict(f"Service {key} is another one now")
        known = self._grants.named(grant_name(address))
        if known is None:
            spec = locks.with_holder(AddressGrantSpec(address), key, change.grant, standing)
            self._fence()
            made = AddressGrant(ObjectMeta(name=grant_name(address)), spec)
            try:
                self._grants.note(await self._client.create(ADDRESS_GRANTS, made))
            except Conflict:
                await self._prove_lock(made)
                raise
            return
        former = known.holder(key)
        if former is not None and former.uid not in ("", change.uid):
            await self._prove_gone(key, former.uid)
        await self._replace(known, locks.with_holder(known.spec, key, change.grant, standing))

    async def _take_back(self, change: TakeBack) -> None:
        key = change.service
        known = self._grants.named(grant_name(change.address))
        holder = known.holder(key) if known is not None else None
        if known is None or holder is None:
            return
        service = self._newest.of([key]).get(key)
        standing = standing_of(service)
        if standing is None or standing.uid != holder.uid:
            if holder.uid:
                await self._prove_gone(key, holder.uid)
            keep = known.spec.keep
        else:
            if locks.may_be_published(standing, holder):
                standing = await self._outdate(key, standing)
            if not locks.releasable(standing, holder, change.address, change.leave):
                raise Conflict(f"Service {key} still shows {change.address}")
            keep = service is not None and keeps(service)
        if not keep or change.leave is not None:
            await self._write(
                known, locks.without_holder(known.spec, key, change.leave, keep=False)
            )
            return
        async with self._keeping.deciding:
            keep = await self._keeping.may_keep(key, holder.uid, known)
            await self._write(
                known,
                locks.without_holder(known.spec, key, None, keep=keep, since=self._keeping.since),
            )

    async def _end_keeping(self, change: EndKeeping) -> None:
        known = self._grants.named(grant_name(change.address))
        holder = known.holder(change.service) if known is not None else None
        if known is None or holder is None or holder.uid:
            return
        await self._keeping.prove_lapsed(holder)
        await self._write(known, locks.without_holder(known.spec, change.service, None, keep=False))
        log.info(
            "address is no longer kept",
            address=change.address,
            service=str(change.service),
            why=change.why,
        )

    async def _date_keeping(self, change: DateKeeping) -> None:
        known = self._grants.named(grant_name(change.address))
        if known is None:
            return
        await self._replace(known, locks.dated(known.spec, change.service, self._keeping.since))
        written = self._grants.named(grant_name(change.address))
        if (
            written is not None
            and (holder := written.holder(change.service))
            and not holder.uid
            and not holder.kept_since
        ):
            self._dates_are_kept = False
            why = "the definition of AddressGrant is older than this controller"
            log.warning(f"addresses are kept without a time limit: {why}", fix=INSTALL)

    async def _write(self, known: AddressGrant, spec: AddressGrantSpec) -> None:
        """Make the lock what it should be; without holders it goes."""
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
            raise Conflict(f"AddressGrant {known.metadata.name} was deleted meanwhile") from None
        self._grants.note(answer)

    async def _prove_lock(self, wanted: AddressGrant) -> None:
        """Somebody else has made it. Raises Unavailable if that is no lock on the address, so that
        it stays in the way."""
        name = wanted.metadata.name
        try:
            found = await self._client.get(ADDRESS_GRANTS, ("", name))
        except NotFound:
            return
        if not found.is_lock:
            raise Unavailable(
                f"AddressGrant {name} is to be the lock on {wanted.spec.address}, but names "
                f"{found.spec.address!r}",
                fix=f"delete it, `kubectl delete addressgrant {name}`, and it is made anew",
            )

    async def _prove_gone(self, key: ServiceKey, uid: str) -> None:
        """That we do not know a Service is no proof: the watch may be behind. Raises Conflict if it
        is there."""
        try:
            found = await self._client.get(SERVICES, key)
        except NotFound:
            return
        if found.metadata.uid == uid:
            raise Conflict(f"Service {key} is there, but not yet known")

    async def _outdate(self, key: ServiceKey, standing: Standing) -> Standing:
        """Move the Service to a new version, so that no publication over the one that a grant was
        written for can still succeed. It happens when a Service is given up before anything was
        published, and changed in nothing."""
        marked = {"annotations": {RELEASING_ANNOTATION: str(standing.version)}}
        for metadata in (marked, None):
            await self._writer.apply(
                key, standing.uid, field_manager=FIELD_MANAGER, metadata=metadata
            )
        return standing_of(self._newest.of([key]).get(key)) or standing


def standing_of(service: Service | None) -> Standing | None:
    if service is None:
        return None
    return Standing(service.metadata.uid, service.metadata.version, shown_by(service))
