"""The driver of class `fairlead.io/octavia`: load balancers of OpenStack.

In: LoadBalancers with OctaviaSettings. Out: at Octavia a load balancer for each, with listeners,
pools, members and monitors as wanted; and its address, for whoever publishes it. What was found
last is kept in memory and believed until the next audit, or until a step fails: then a look comes
first. Made to be run with many Services at once, each in a pass of its own: Octavia takes seconds
to minutes for each load balancer. Invariant: what does not carry this cluster's mark is neither
seen nor touched. No load balancer is made without a look whether there is one, be it broken; of
several the one that works stays."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from weakref import WeakValueDictionary

import msgspec
import structlog

from fairlead.drivers.octavia import diff as differences
from fairlead.drivers.octavia import floating
from fairlead.drivers.octavia.apply import PATIENT, Looks, Pace, StillWorking, wait_settled
from fairlead.drivers.octavia.attempts import RARELY_S, Attempts
from fairlead.drivers.octavia.changes import (
    Await,
    Call,
    Change,
    Close,
    Expose,
    Forget,
    GiveUp,
    Loosen,
    Obstacle,
    Open,
    Replan,
    Seek,
    Step,
    Verify,
)
from fairlead.drivers.octavia.cloud import Cloud, Failed
from fairlead.drivers.octavia.elsewhere import Seeker
from fairlead.drivers.octavia.health import healths
from fairlead.drivers.octavia.marks import Owner
from fairlead.drivers.octavia.network import Network, further
from fairlead.drivers.octavia.read import listeners_on, read_all, read_one
from fairlead.drivers.octavia.render import trees_of
from fairlead.drivers.octavia.tree import Found, FoundTree, Tree, family_of, provider_of
from fairlead.errors import Conflict, FairleadError, Refused, Unavailable
from fairlead.kube.events import Recorder
from fairlead.model import DONE, LoadBalancer, OctaviaStanding, Outcome, ServiceKey
from fairlead.role_state import LoadBalancerHealth, OctaviaState

log = structlog.get_logger()

CREATED = "CreatedLoadBalancer"
MOST_ROUNDS = 3
"""So often, at most, what is left at Neutron is seen to before others have their turn."""
OBSTACLE_S = 20.0
"""So soon it is looked again at a load balancer that others hold."""
NOTHING = Found(())


class OctaviaDriver:
    """Implements fairlead.drivers.Driver."""

    name = "octavia"

    def __init__(
        self,
        cloud: Cloud,
        owner: Owner,
        recorder: Recorder,
        *,
        clock: Callable[[], float],
        fence: Callable[[], None] = lambda: None,
        learnt: Callable[[Collection[ServiceKey]], None] = lambda _: None,
        pace: Pace = PATIENT,
        network: bool = False,
        secured: bool = False,
    ) -> None:
        """`fence` is called before each write, and raises if it must not be made: we do not lead
        any more. `clock`: seconds, that only go on. `learnt`: told of Services whose load balancer
        was found to be of another provider than was known: a plan from before may be wrong, or a
        refusal. `network`: see to floating IPs too; `secured`: and to the security group of the
        nodes."""
        self._cloud = cloud
        self._owner = owner
        self._recorder = recorder
        self._fence = fence
        self._learnt = learnt
        self._looks = Looks(pace)
        self._network = Network(cloud, owner, recorder, floats=network, secures=secured)
        self._known: dict[ServiceKey, Found] = {}
        self._seen_s: dict[ServiceKey, float] = {}
        self._all_seen_s = clock()
        self._whole = False
        """Whether those that are not known have none."""
        self._unsure: set[ServiceKey] = set()
        """Something has changed there, or may have."""
        self._touched: set[ServiceKey] = set()
        """Of which something was changed since the last look at everything began."""
        self._clock = clock
        self._attempts = Attempts(clock)
        self._seeker = Seeker(cloud, owner, recorder)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Of load balancers: several Services may be on one, and Octavia takes one write at a
        time."""

    @property
    def unread(self) -> bool:
        """Nothing is known yet: Octavia could not be read."""
        return not self._whole

    def render(self, intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, Tree]:
        """Pure."""
        return trees_of(intents, self._owner)

    def diff(
        self, desired: Mapping[ServiceKey, Tree], actual: Mapping[ServiceKey, Found]
    ) -> Sequence[Change]:
        """Pure."""
        return differences.diff(desired, actual, covers=self._network.covers)

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Found]:
        """All that is there, by a look; or what is known, of those whereof something is."""
        if keys is None:
            self._touched = self._unsure.copy()
            begun_s = self._clock()
            try:
                found = await self._network.with_all(await read_all(self._cloud, self._owner))
            except FairleadError as error:
                if self._whole:
                    raise
                # At the start each Service is to tell its owner, by failing in its turn.
                log.warning("Octavia cannot be read", problem=str(error))
                return {}
            # What was changed meanwhile was seen before or after.
            kept = {key: known for key, known in self._known.items() if key in self._touched}
            before = self._standing()
            for key in (key for key in found if key not in self._touched):
                self._seeker.remember(key, found[key].trees)
            self._known = {
                key: each for key, each in found.items() if key not in self._touched
            } | kept
            self._whole = True
            self._all_seen_s = begun_s
            if changed := {key for key, _ in before.items() ^ self._standing().items()}:
                self._learnt(changed)
            keys = self._known.keys() | found.keys() | set(self._attempts.keys)
        for key in keys:
            if key in self._unsure or (key not in self._known and not self._whole):
                await self._look(key)
        told = {key: self._as_found(key) for key in keys}
        return {key: each for key, each in told.items() if each != NOTHING or key in self._known}

    async def apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        """Carry the steps out, Service by Service."""
        outcomes: dict[ServiceKey, Outcome] = {}
        for key in dict.fromkeys(change.service for change in changes):
            own = [change for change in changes if change.service == key]
            outcome = await self._apply_one(key, own)
            if outcome != DONE:
                outcomes[key] = outcome
        return outcomes

    def standing_of(self, key: ServiceKey, uid: str) -> OctaviaStanding | None:
        """What the load balancer is that the Service of this uid has, as far as is known."""
        tree = self._chosen(key, uid)
        provider = provider_of(tree.provider) if tree is not None else None
        return (
            OctaviaStanding(provider, tree.families or ("IPv4",))
            if tree is not None and provider is not None
            else None
        )

    def located(self, intent: LoadBalancer) -> LoadBalancer:
        """With the addresses that it has at Octavia."""
        tree = self._chosen(intent.service, intent.uid)
        if tree is None or not tree.address:
            return intent
        wish = intent.octavia.floating if intent.octavia is not None else None
        first = floating.shown(tree, wish)
        wanted = {each.family for each in intent.listeners}
        further = [address for address, _ in tree.further if family_of(address) in wanted]
        shown = [first, *further] if family_of(first) in wanted or not further else further
        return msgspec.structs.replace(intent, addresses=tuple(shown)) if first else intent

    def knows(self, key: ServiceKey) -> bool:
        """Whether there is something to do about it, were there no such Service, as far as is
        known."""
        found = self._known.get(key, NOTHING)
        return bool(found.trees or found.rules) or any(not each.kept for each in found.loose)

    def addresses(self, key: ServiceKey) -> Collection[str]:
        """Those of the Service's load balancers, as far as is known."""
        return {address for tree in self._known.get(key, NOTHING).trees for address in tree.shown}

    def health(self) -> list[LoadBalancerHealth]:
        """How all are by Octavia's account, when they were seen last. May be called from any
        thread."""
        now_s, seen_s, known = self._clock(), self._seen_s.copy(), self._known.copy()
        return healths(
            known, {key: now_s - max(seen_s.get(key, 0.0), self._all_seen_s) for key in known}
        )

    def status(self) -> OctaviaState:
        """For `/state`. May be called from any thread."""
        return OctaviaState(tuple(self.health()))

    def _standing(self) -> dict[ServiceKey, frozenset[tuple[str, ...]]]:
        """What plans count with."""
        return {
            key: frozenset((tree.provider, *tree.families) for tree in found.trees)
            for key, found in self._known.items()
        }

    def _chosen(self, key: ServiceKey, uid: str) -> FoundTree | None:
        return differences.chosen(
            self._known.get(key, Found(())).trees, uid, at=self._seeker.at(key, uid)
        )

    async def _look(self, key: ServiceKey) -> None:
        self._unsure.discard(key)
        try:
            trees = await self._seeker.add_to(key, await read_one(self._cloud, self._owner, key))
            found = await self._network.with_one(key, trees)
        except BaseException:
            self._unsure.add(key)
            raise
        self._known.pop(key, None)
        self._seen_s.pop(key, None)
        if found is not None:
            self._seen_s[key] = self._clock()
            self._known[key] = found

    def _as_found(self, key: ServiceKey) -> Found:
        return self._attempts.told(key, self._seeker.told(key, self._known.get(key, NOTHING)))

    async def _apply_one(self, key: ServiceKey, changes: Sequence[Change]) -> Outcome:
        self._unsure.add(key)
        self._touched.add(key)
        calls = [change for change in changes if isinstance(change, Step)]
        try:
            if calls:
                await self._carry_out(
                    key, calls, dropping=not any(isinstance(change, Verify) for change in changes)
                )
            for change in changes:
                match change:
                    case Call() | Expose() | Open() | Close() | Loosen():
                        continue
                    case Await():
                        await wait_settled(self._cloud, change.tree, self._looks)
                        raise Conflict(f"done: {change}")
                    case Replan():
                        await self._look(key)
                        raise Conflict(str(change))
                    case Seek():
                        await self._seeker.seek(change)
                        await self._look(key)
                        raise Conflict(f"done: {change}")
                    case Obstacle():
                        return Outcome(
                            "unavailable", f"{change.message}; {change.fix}", again_s=OBSTACLE_S
                        )
                    case GiveUp():
                        fix = "ask the cloud's operators; it is tried again now and then"
                        return Outcome(
                            "unavailable", f"{change.problem}; {fix}", again_s=RARELY_S / 10
                        )
                    case Forget():
                        continue
                    case Verify():
                        return await self._verify(change)
        except StillWorking:
            return Outcome(
                "waiting",
                f"Octavia is still at work: {changes[0]}",
                again_s=self._looks.pace.last_s,
            )
        self._unsure.discard(key)
        self._known.pop(key, None)  # all steps went to take it away
        self._seeker.forget(key)
        self._attempts.forget(key)
        return DONE

    async def _carry_out(self, key: ServiceKey, calls: Sequence[Step], *, dropping: bool) -> None:
        """`dropping`: nothing of the Service is to be left."""
        async with AsyncExitStack() as held:
            for name in sorted({call.tree for call in calls if call.tree}) or [str(key)]:
                await held.enter_async_context(self._locks.setdefault(name, asyncio.Lock()))
            creation = next((call for call in calls if isinstance(call, Call) and call.makes), None)
            if creation is not None:
                self._attempts.stop_if_refused(creation)
            if creation is not None or await self._company_changed(key, calls, dropping=dropping):
                before = self._known.get(key)
                await self._look(key)
                if self._known.get(key) != before:
                    raise Conflict(
                        f"the load balancers of Service {key} are others than was thought"
                    )
                self._unsure.add(key)
            repairs = any(isinstance(call, Call) and call.repairs for call in calls)
            if repairs:
                self._attempts.count(key)
            try:
                await self._network.carry_out(calls, self._looks, self._fence)
            except Failed:
                if creation is not None and not repairs:
                    self._attempts.count(key)
                raise
            except Refused as error:
                if creation is not None:
                    self._attempts.refused(creation, error)
                elif (
                    repairs
                ):  # to fail over may be for the cloud's operators alone: there is another way
                    raise Unavailable(str(error)) from error
                raise

    async def _company_changed(
        self, key: ServiceKey, calls: Sequence[Step], *, dropping: bool
    ) -> bool:
        """Whether listeners of others have come or gone on a load balancer that is to go, or that
        the Service leaves: whoever is the last one takes it away."""
        left = {
            call.tree
            for call in calls
            if isinstance(call, Call) and (dropping or call.ends or call.leaves)
        }
        for tree in self._known.get(key, Found(())).trees:
            own = {each.id for each in tree.listeners}
            if (
                tree.id in left
                and len(await listeners_on(self._cloud, tree.id) - own) != tree.others
            ):
                return True
        return False

    async def _verify(self, change: Verify) -> Outcome:
        key, before = change.service, self._chosen(change.service, change.wanted.uid)
        left = await self._left(change)
        after = self._chosen(key, change.wanted.uid)
        if after is not None and (before is None or before.id != after.id):
            message = (
                f"load balancer {after.id} of provider {change.wanted.provider} at "
                f"{after.address}: {change.wanted.why}"
            )
            self._recorder.event(key, change.wanted.uid, "Normal", CREATED, message)
        for _ in range(MOST_ROUNDS):
            if not (steps := further(left)):
                break
            self._unsure.add(key)
            await self._carry_out(key, steps, dropping=False)
            left = await self._left(change)
        if left:
            return Outcome(
                "unavailable", f"Octavia has not carried out all: what is left is {left[0]}"
            )
        self._attempts.forget(key)
        return DONE

    async def _left(self, change: Verify) -> Sequence[Change]:
        """The steps that are left, by a look; the last of them is to look again."""
        await self._look(change.service)
        found = self._seeker.told(change.service, self._known.get(change.service, NOTHING))
        return self.diff({change.service: change.wanted}, {change.service: found})
