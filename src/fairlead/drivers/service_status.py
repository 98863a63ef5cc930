"""Write one part of a Service by server-side apply.

In: the fields that one field manager wants on a Service. Out: the Service as it is then. On the
status subresource, which also takes metadata, so that rights on `services/status` suffice.
Invariant: the fields of one manager are exactly those of its last call (KEP-555); a Service of the
same name that was made anew is not written (Conflict); nothing is written when the fence does not
let it."""

from collections.abc import Callable, Mapping

from fairlead.drivers.newest import NewestServices
from fairlead.errors import Conflict
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.objects import SERVICES, ObjectKey, Service
from fairlead.model import ServiceKey


class ServiceWriter:
    """Shared by all drivers that write on Services."""

    def __init__(
        self, client: Client, newest: NewestServices, *, fence: Callable[[], None] = lambda: None
    ) -> None:
        """`fence` is called before each write, and raises if it must not be made: we do not lead
        any more."""
        self._client = client
        self._newest = newest
        self._fence = fence

    async def apply(
        self,
        key: ServiceKey,
        uid: str,
        *,
        field_manager: str,
        metadata: Mapping[str, object] | None = None,
        status: Mapping[str, object] | None = None,
        version: str = "",
    ) -> Service | None:
        """Make these the fields of `field_manager`; what it had before and is not among them goes.
        With `version` only over that version of the Service, else Conflict. None: there is no such
        Service any more, nor anything of ours on it."""
        body: dict[str, object] = {
            "metadata": {**(metadata or {}), "uid": uid}
            | ({"resourceVersion": version} if version else {})
        }
        if status:
            body["status"] = status
        self._fence()
        try:
            answer = await self._client.apply(
                SERVICES,
                ObjectKey(*key),
                body,
                field_manager=field_manager,
                subresource="status",
                force=True,
            )
        except NotFound:
            return None
        except Conflict:
            if version:
                # A change in nothing that is read is not told by the watch, but it is another
                # version all the same.
                self._newest.note(await self._client.get(SERVICES, key))
            raise
        self._newest.note(answer)
        return answer
