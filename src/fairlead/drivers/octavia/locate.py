"""Finds the load balancers that a Service is to be on and that do not carry its mark.

In: a Claimant. Out: the load balancer that the Service names, to be on it beside others, or the one
that cloud-provider-openstack has made for the Service, to be taken over; and what is there of the
Service. The Locator remembers which load balancers these are: by its marks alone a Service is found
on them when everything is read, and not when one Service is. Invariants: nothing is taken over that
the configuration does not name, that carries the mark of another cluster or Service, or whose own
name does not show that it was made for this Service. Nothing is shared without the consent of its
owner (`marks.shares_with`); a Service that is on a load balancer already stays there."""

from collections.abc import Collection, Iterable, Sequence

import msgspec

from fairlead.drivers.octavia.balancers import BalancerState, Candidate, Found
from fairlead.drivers.octavia.cloud import Cloud
from fairlead.drivers.octavia.marks import ANY, SHARED_WITH, Owner, shares_with
from fairlead.drivers.octavia.read import find_by_id, find_called, read_at
from fairlead.errors import Refused
from fairlead.kube.events import Recorder
from fairlead.model import ServiceKey, SharedOrAdopted
from fairlead.plan.cloud import Claimant

ADOPTING = "AdoptingLoadBalancer"
SHARING = "SharingLoadBalancer"


class _Place(msgspec.Struct, frozen=True):
    """A load balancer to look at. `names`: of one that is taken over; None: of one that is
    shared."""

    id: str
    uid: str
    names: tuple[str, ...] | None = None


class _Result(msgspec.Struct, frozen=True):
    """`id`: empty: there is none."""

    wish: SharedOrAdopted
    uid: str
    id: str


class Locator:
    """What is known of Services that are, were or are to be on such load balancers."""

    def __init__(self, cloud: Cloud, owner: Owner, recorder: Recorder) -> None:
        self._cloud = cloud
        self._owner = owner
        self._recorder = recorder
        self._places: dict[ServiceKey, dict[str, _Place]] = {}
        self._results: dict[ServiceKey, _Result] = {}

    async def locate(self, key: ServiceKey, claimant: Claimant) -> None:
        """Find what the Service wishes for. Raises Refused if it cannot be had."""
        wish = claimant.elsewhere
        self._results.pop(key, None)
        if wish is None:
            return
        found = await find_by_id(self._cloud, wish.id) if wish.id else None
        adopted = found if found is not None and self._is_made_for(found, key, wish.names) else None
        if found is None and wish.names:
            adopted = await self._find_by_names(key, wish.names)
        elif found is None:
            raise Refused(
                f"there is no load balancer {wish.id}", fix="see fairlead.io/load-balancer-id"
            )
        at = adopted or found
        if adopted is None and found is not None:
            await self._check_consent(found, key, claimant.uid, wish)
        self._results[key] = _Result(wish, claimant.uid, at.id if at is not None else "")
        if at is None or self._owner.whose(at.tags) == (key, claimant.uid):
            return
        place = _Place(at.id, claimant.uid, wish.names if adopted is not None else None)
        self._places.setdefault(key, {})[at.id] = place
        where = f"load balancer {at.id} of provider {at.provider} at {at.address}"
        if adopted is not None:
            message = f"{where}, made by cloud-provider-openstack, is taken over as it is"
            self._recorder.event(key, claimant.uid, "Normal", ADOPTING, message)
        else:
            message = f"the Service's listeners are on {where}, which it may share with others"
            self._recorder.event(key, claimant.uid, "Normal", SHARING, message)

    async def _check_consent(
        self, found: Candidate, key: ServiceKey, uid: str, wish: SharedOrAdopted
    ) -> None:
        """Raises Refused if the owner of this load balancer does not share it with the Service,
        unless the Service is on it already."""
        if shares_with(self._owner, found.tags, key, wish.names):
            return
        there = await read_at(self._cloud, self._owner, found.id, (key, uid))
        if not any(
            balancer.uid == uid and (balancer.listeners or balancer.pools) for balancer in there
        ):
            tag = f"{SHARED_WITH}{key.namespace}"
            raise Refused(
                f"load balancer {found.id} is not shared with namespace {key.namespace}",
                fix=f"ask its owner to allow it (openstack loadbalancer set --tag {tag} "
                f"{found.id}), or remove the annotation "
                "load-balancer-id",
            )

    async def add_to(
        self, key: ServiceKey, balancers: Sequence[BalancerState]
    ) -> list[BalancerState]:
        """With what there is elsewhere."""
        whole = list(balancers)
        for place in self._places.get(key, {}).values():
            if any(balancer.id == place.id for balancer in balancers):
                continue  # it carries our mark by now
            whole += await read_at(
                self._cloud, self._owner, place.id, (key, place.uid), place.names
            )
        return whole

    def remember(self, key: ServiceKey, balancers: Iterable[BalancerState]) -> None:
        """Where a look at everything has found it."""
        for balancer in balancers:
            if balancer.ownership == "guest":
                self._places.setdefault(key, {}).setdefault(
                    balancer.id, _Place(balancer.id, balancer.uid)
                )

    def forget(self, key: ServiceKey) -> None:
        """The Service has nothing any more."""
        self._places.pop(key, None)
        self._results.pop(key, None)

    def with_result(self, key: ServiceKey, found: Found) -> Found:
        """What was found, with the last result of `locate`."""
        result = self._results.get(key)
        if result is None:
            return found
        return msgspec.structs.replace(found, located_for=result.wish, located_id=result.id)

    def id_for(self, key: ServiceKey, uid: str) -> str:
        """The id of the load balancer that was located for the Service of this uid; empty: none
        was."""
        result = self._results.get(key)
        return result.id if result is not None and result.uid == uid else ""

    def _is_made_for(self, found: Candidate, key: ServiceKey, names: Collection[str]) -> bool:
        """Whether cloud-provider-openstack has made it for this Service, and nobody else has it
        now."""
        marked = [tag for tag in found.tags if tag.startswith(ANY)]
        if found.name not in names or marked:
            return False
        told = found.description.startswith(f"Kubernetes external service {key} from cluster ")
        return told or found.name in found.tags

    async def _find_by_names(self, key: ServiceKey, names: Iterable[str]) -> Candidate | None:
        """Raises Refused if there are several."""
        lists = [await find_called(self._cloud, name) for name in names]
        made = [
            each for found in lists for each in found if self._is_made_for(each, key, tuple(names))
        ]
        if len(made) > 1:
            raise Refused(
                f"load balancers {', '.join(each.id for each in made)} are all called "
                f"{made[0].name}",
                fix="delete those that nobody needs, or name the one to keep in "
                "fairlead.io/load-balancer-id",
            )
        return made[0] if made else None
