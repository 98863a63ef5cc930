"""Writes a part of a Service by server-side apply.

In: the fields that one field manager sets on a Service. Out: the Service after the write. The
status subresource is used, which also accepts metadata, so that rights on `services/status`
suffice. Invariants: a manager owns exactly the fields of its last call (KEP-555); a Service that
was recreated under the same name is not written to (Conflict); nothing is written when the fence
raises."""

from collections.abc import Callable, Mapping

from fairlead.drivers.mutation_cache import ServiceCache
from fairlead.errors import Conflict
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.objects import SERVICES, ObjectKey, Service
from fairlead.model import ServiceKey


class ServiceWriter:
    """Server-side apply on Services. Shared by all drivers that write to Services."""

    def __init__(
        self, client: Client, services: ServiceCache, *, fence: Callable[[], None] = lambda: None
    ) -> None:
        """`fence` is called before each write, and raises if this process is no longer the
        leader."""
        self._client = client
        self._services = services
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
        """Make `metadata` and `status` the fields of `field_manager`. The API server removes
        previous fields of the manager that are not among them.

        Return the Service after the write, or None if the Service no longer exists. Raise Conflict
        if the Service has another uid or, if `version` is given, another version."""
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
                # The watch does not report a change that affects no field that the role reads, but
                # such a change makes a new version. Store that version, so that the retry uses it.
                self._services.note(await self._client.get(SERVICES, key))
            raise
        self._services.note(answer)
        return answer
