"""Finds the load balancers that a Service shares or adopts, and that do not carry its mark.

In: a Claimant. Out: the load balancer that the Service names, to share it, or the load balancer
that cloud-provider-openstack made for the Service, to adopt it; and the Service's parts on it. The
Locator remembers these load balancers: a read of everything finds the Service's parts on them by
their marks, but a read of one Service does not. Invariants: a load balancer is adopted only if the
configuration names its cluster, it carries no mark of another cluster or Service, and its own name
shows that it was made for this Service. Nothing is shared without the consent of its owner
(`marks.shares_with`); a Service that is on a load balancer already stays there."""

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
    """A load balancer to read for a Service. `names`: the names that cloud-provider-openstack gives
    to an adopted load balancer; None: the load balancer is shared."""

    id: str
    uid: str
    names: tuple[str, ...] | None = None


class _Result(msgspec.Struct, frozen=True):
    """The result of a search. `id` is empty if nothing was found."""

    requested: SharedOrAdopted
    uid: str
    id: str


class Locator:
    """The shared and adopted load balancers of all Services."""

    def __init__(self, cloud: Cloud, owner: Owner, recorder: Recorder) -> None:
        self._cloud = cloud
        self._owner = owner
        self._recorder = recorder
        self._places: dict[ServiceKey, dict[str, _Place]] = {}
        self._results: dict[ServiceKey, _Result] = {}

    async def locate(self, key: ServiceKey, claimant: Claimant) -> None:
        """Find the load balancer that the Service requests. Raise Refused if it cannot be used."""
        requested = claimant.shared_or_adopted
        self._results.pop(key, None)
        if requested is None:
            return
        found = await find_by_id(self._cloud, requested.id) if requested.id else None
        adopted = (
            found if found is not None and self._is_made_for(found, key, requested.names) else None
        )
        if found is None and requested.names:
            adopted = await self._find_by_names(key, requested.names)
        elif found is None:
            raise Refused(
                f"load balancer {requested.id} does not exist",
                fix="check fairlead.io/load-balancer-id",
            )
        at = adopted or found
        if adopted is None and found is not None:
            await self._check_consent(found, key, claimant.uid, requested)
        self._results[key] = _Result(requested, claimant.uid, at.id if at is not None else "")
        if at is None or self._owner.marked_service(at.tags) == (key, claimant.uid):
            return
        place = _Place(at.id, claimant.uid, requested.names if adopted is not None else None)
        self._places.setdefault(key, {})[at.id] = place
        where = f"load balancer {at.id} of provider {at.provider} at {at.address}"
        if adopted is not None:
            message = f"{where}, made by cloud-provider-openstack, is adopted without changes"
            self._recorder.event(key, claimant.uid, "Normal", ADOPTING, message)
        else:
            message = f"the Service's listeners are on {where}, which other Services may use too"
            self._recorder.event(key, claimant.uid, "Normal", SHARING, message)

    async def _check_consent(
        self, found: Candidate, key: ServiceKey, uid: str, requested: SharedOrAdopted
    ) -> None:
        """Raise Refused if the owner of this load balancer does not share it with the Service,
        unless the Service is on it already."""
        if shares_with(self._owner, found.tags, key, requested.names):
            return
        present = await read_at(self._cloud, self._owner, found.id, (key, uid))
        if not any(
            balancer.uid == uid and (balancer.listeners or balancer.pools) for balancer in present
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
        """Return `balancers` with the Service's parts on shared and adopted load balancers."""
        whole = list(balancers)
        for place in self._places.get(key, {}).values():
            if any(balancer.id == place.id for balancer in balancers):
                continue  # it carries the Service's mark by now
            whole += await read_at(
                self._cloud, self._owner, place.id, (key, place.uid), place.names
            )
        return whole

    def remember(self, key: ServiceKey, balancers: Iterable[BalancerState]) -> None:
        """Remember the load balancers on which a read of everything has found the Service as a
        guest."""
        for balancer in balancers:
            if balancer.ownership == "guest":
                self._places.setdefault(key, {}).setdefault(
                    balancer.id, _Place(balancer.id, balancer.uid)
                )

    def forget(self, key: ServiceKey) -> None:
        """Forget a Service that has no load balancer any more."""
        self._places.pop(key, None)
        self._results.pop(key, None)

    def with_result(self, key: ServiceKey, found: Found) -> Found:
        """Return `found` with the last result of `locate`."""
        result = self._results.get(key)
        if result is None:
            return found
        return msgspec.structs.replace(found, located_for=result.requested, located_id=result.id)

    def id_for(self, key: ServiceKey, uid: str) -> str:
        """Return the id of the load balancer that was located for the Service of this uid; "" if
        none was."""
        result = self._results.get(key)
        return result.id if result is not None and result.uid == uid else ""

    def _is_made_for(self, found: Candidate, key: ServiceKey, names: Collection[str]) -> bool:
        """Return whether cloud-provider-openstack made the load balancer for this Service, and no
        cluster has marked it since."""
        marked = [tag for tag in found.tags if tag.startswith(ANY)]
        if found.name not in names or marked:
            return False
        description_fits = found.description.startswith(
            f"Kubernetes external service {key} from cluster "
        )
        return description_fits or found.name in found.tags

    async def _find_by_names(self, key: ServiceKey, names: Iterable[str]) -> Candidate | None:
        """Return the adopted load balancer with one of these names. Raise Refused if there are
        several."""
        lists = [await find_called(self._cloud, name) for name in names]
        made = [
            each for found in lists for each in found if self._is_made_for(each, key, tuple(names))
        ]
        if len(made) > 1:
            raise Refused(
                f"load balancers {', '.join(each.id for each in made)} all have the name "
                f"{made[0].name}",
                fix="delete the unused ones, or name the one to keep in "
                "fairlead.io/load-balancer-id",
            )
        return made[0] if made else None
