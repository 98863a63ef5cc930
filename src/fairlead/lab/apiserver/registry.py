"""The verbs create, update, patch, apply, bind and delete on the stored objects. No HTTP.

In: a decoded object or patch, and its sender. Out: the stored object, or ApiFailure. No verb
awaits, so writes cannot overlap. Invariants: a write that fails changes nothing and takes no
address or port; a write that changes nothing stores nothing, so the version stays and watchers get
no event; a Service keeps its addresses until it is removed. Follows the generic registry of the API
server (registry/generic/registry/store.go, registry/rest).
"""

import secrets
import uuid
from collections.abc import Callable
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from fairlead.kube.rules import defaults
from fairlead.kube.rules import service as service_rules
from fairlead.kube.rules.allocation import Allocator, Reservation
from fairlead.kube.rules.causes import Cause, NoneFree, Object, Rejected, UsedTwice, invalid
from fairlead.kube.rules.families import set_families
from fairlead.kube.rules.types import without_nulls
from fairlead.lab.apiserver import failure, validation
from fairlead.lab.apiserver.apply import Applied, Duplicates, apply
from fairlead.lab.apiserver.binding import bound
from fairlead.lab.apiserver.definitions import Kinds, established
from fairlead.lab.apiserver.failure import ApiFailure
from fairlead.lab.apiserver.kinds import (
    CUSTOM_RESOURCE_DEFINITIONS,
    ENDPOINT_SLICES,
    ENDPOINTS,
    EVENTS,
    LEASES,
    NAMESPACES,
    NODES,
    PODS,
    SERVICES,
    Kind,
)
from fairlead.lab.apiserver.ownership import (
    Manager,
    Owners,
    leaves,
    read_owners,
    record_update,
    write_owners,
)
from fairlead.lab.apiserver.patch import json_patch, merge, strategic_merge
from fairlead.lab.apiserver.schema import shape_of
from fairlead.lab.apiserver.store import Store, Stored
from fairlead.lab.apiserver.wire import check_types
from fairlead.lab.apiserver.writes import (
    Deletion,
    Write,
    applicable,
    check_name,
    check_namespace,
    desired,
    given_metadata,
    grace_period_s,
    next_state,
)

JSON_PATCH: Final = "application/json-patch+json"
MERGE_PATCH: Final = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH: Final = "application/strategic-merge-patch+json"

FIRST_NAMESPACES: Final = ("default", "kube-node-lease", "kube-public", "kube-system")

_WITH_GENERATION: Final = frozenset({PODS, ENDPOINT_SLICES, CUSTOM_RESOURCE_DEFINITIONS})
_CREATED_BY_UPDATE: Final = frozenset({SERVICES, ENDPOINTS, LEASES, EVENTS})
_SUFFIX_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"


def utc_now() -> datetime:
    return datetime.now(UTC)


def _rfc3339(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _has_generation(kind: Kind) -> bool:
    return kind in _WITH_GENERATION or kind.custom is not None


class Registry:
    """The registry, through which all writes pass. `now` is the clock, in UTC."""

    def __init__(
        self, store: Store, allocator: Allocator, now: Callable[[], datetime] = utc_now
    ) -> None:
        self.store = store
        self.kinds = Kinds()
        self._allocator = allocator
        self._now = now
        for name in FIRST_NAMESPACES:
            self.create(NAMESPACES, "", {"metadata": {"name": name}}, Write("kube-apiserver"))

    def get(self, kind: Kind, namespace: str, name: str) -> Stored:
        """Return an object. Raise ApiFailure 404 if it does not exist."""
        stored = self.store.get(kind, namespace, name)
        if stored is None:
            raise failure.not_found(kind, name)
        return stored

    def create(self, kind: Kind, namespace: str, obj: Object, write: Write) -> Stored:
        """Store a new object. Raise ApiFailure."""
        if (obj.get("metadata") or {}).get("resourceVersion"):
            raise failure.storage_error(
                500, "resourceVersion should not be set on objects to be created"
            )
        obj = self._first_metadata(kind, namespace, without_nulls(obj))
        self._check_namespace(kind, obj["metadata"])
        self._set_defaults(kind, obj)
        if kind is SERVICES:
            defaults.prepare_create(obj)
        status = validation.first_status(kind, obj)
        if status is not None:
            obj["status"] = status
        # The server sets the first status, so no manager owns it. A Node is the exception: its
        # kubelet registers it with a status. The finalizer in a Namespace's spec has no owner
        # either.
        own = ("status",) if kind is not NODES else ()
        written = {
            name: value
            for name, value in obj.items()
            if name not in (("spec", *own) if kind is NAMESPACES else own)
        }
        after = leaves(written, shape_of(kind), containers=True)
        owners = record_update({}, self._manager(kind, write, "Update"), {}, after, self._time())
        return self._store_new(kind, obj, owners, write)

    def _first_metadata(self, kind: Kind, namespace: str, obj: Object) -> Object:
        check_types(kind, obj)
        check_namespace(obj.get("metadata") or {}, namespace)
        metadata = given_metadata(obj.get("metadata") or {})
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"][:58] + "".join(
                secrets.choice(_SUFFIX_LETTERS) for _ in range(5)
            )
        if kind.namespaced:
            metadata["namespace"] = namespace
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = self._time()
        if _has_generation(kind):
            metadata["generation"] = 1
        return obj | {"apiVersion": kind.group_version, "kind": kind.kind, "metadata": metadata}

    def _check_namespace(self, kind: Kind, metadata: Object) -> None:
        if not kind.namespaced:
            return
        namespace, name = metadata.get("namespace", ""), metadata.get("name", "")
        if namespace == "":
            raise failure.bad_request("an empty namespace may not be set during creation")
        if self.get(NAMESPACES, "", namespace).object["metadata"].get("deletionTimestamp"):
            raise failure.namespace_terminating(kind, namespace, name)

    def _set_defaults(self, kind: Kind, obj: Object) -> None:
        if kind in (SERVICES, PODS, NODES):
            obj["spec"] = obj.get("spec") or {}
        if kind is SERVICES:
            defaults.set_defaults(obj)
        else:
            validation.set_defaults(kind, obj)

    def _store_new(self, kind: Kind, obj: Object, owners: Owners, write: Write) -> Stored:
        name, namespace = obj["metadata"].get("name", ""), obj["metadata"].get("namespace", "")
        metadata_causes = list(validation.check_metadata(kind, obj))
        taken = self.store.get(kind, namespace, name)
        if kind is SERVICES:
            reservation = self._reserve(obj, None, write)
            causes = [*metadata_causes, *service_rules.check_service(obj)]
            if causes or taken is not None or write.dry_run:
                reservation.rollback()
        else:
            causes = [*metadata_causes, *validation.check(kind, obj)]
        if causes:
            raise failure.rejected(kind.kind, kind.group, name, causes)
        if taken is not None:
            raise failure.already_exists(
                kind, name, terminating="deletionTimestamp" in taken.object["metadata"]
            )
        obj["metadata"]["managedFields"] = write_owners(owners)
        if write.dry_run:
            return Stored(obj, self.store.version)
        if kind is CUSTOM_RESOURCE_DEFINITIONS:
            obj["status"] = established(obj, self._time())
            self.kinds.define(obj)
        return self.store.put(kind, obj)

    def _reserve(self, obj: Object, old: Object | None, write: Write) -> Reservation:
        """Fill in the families, addresses and ports of a Service. Raise ApiFailure."""
        try:
            set_families(obj, old, self._allocator.families)
            return self._allocator.reserve(obj, old, dry_run=write.dry_run)
        except Rejected as problem:
            name = obj["metadata"].get("name", "")
            raise failure.rejected("Service", "", name, problem.causes) from problem
        except NoneFree as problem:
            raise failure.internal_error(problem.message) from problem
        except UsedTwice as problem:
            raise failure.storage_error(500, problem.message) from problem

    def update(self, kind: Kind, namespace: str, name: str, obj: Object, write: Write) -> Stored:
        """Replace an object. Raise ApiFailure 409 if `resourceVersion` is set and is not the stored
        one."""
        stored = self.store.get(kind, namespace, name)
        metadata = obj.get("metadata") or {}
        check_name(metadata, name)
        if stored is None and kind in _CREATED_BY_UPDATE and not metadata.get("uid"):
            return self.create(
                kind, namespace, obj | {"metadata": metadata | {"name": name}}, write
            )
        if stored is None:
            raise failure.not_found(kind, name)
        check_namespace(metadata, namespace)
        if (kind is LEASES or kind.custom is not None) and not metadata.get("resourceVersion"):
            cause = invalid("metadata.resourceVersion", 0, "must be specified for an update")
            raise failure.rejected(kind.plural, kind.group, name, [cause])
        return self._replace(kind, stored, without_nulls(obj | {"metadata": metadata}), write, None)

    def patch(
        self, kind: Kind, namespace: str, name: str, media_type: str, patch: Any, write: Write
    ) -> Stored:
        """Modify an object by a JSON patch, merge patch or strategic merge patch."""
        stored = self.get(kind, namespace, name)
        if media_type == JSON_PATCH:
            wanted = json_patch(stored.object, patch)
        elif not isinstance(patch, dict):
            raise failure.bad_request(
                "error decoding patch: json: cannot unmarshal array into Go value of type "
                "map[string]interface {}"
            )
        elif media_type == MERGE_PATCH:
            wanted = merge(stored.object, patch)
        elif kind.custom is not None:
            accepted = (JSON_PATCH, MERGE_PATCH, "application/apply-patch+yaml")
            raise failure.unsupported_media_type(accepted)
        else:
            wanted = strategic_merge(stored.object, patch, shape_of(kind))
        check_name(wanted.get("metadata") or {}, name)
        # The merged object shares its unchanged parts with the stored object, which must not be
        # modified.
        return self._replace(kind, stored, deepcopy(wanted), write, None)

    def apply(self, kind: Kind, namespace: str, name: str, wanted: Object, write: Write) -> Stored:
        """Apply an object (server-side apply): create it, or merge the fields that `write.manager`
        wants."""
        wanted = applicable(kind, name, wanted, write.subresource)
        stored = self.store.get(kind, namespace, name)
        manager = self._manager(kind, write, "Apply")
        if stored is None:
            # As in the API server, a kind that an update may create may also be created through its
            # status subresource, if the object is valid without a spec.
            if write.subresource and kind not in _CREATED_BY_UPDATE:
                raise failure.not_found(kind, name)
            owners = self._apply(kind, {}, wanted, {}, manager, force=True).owners
            obj = self._first_metadata(kind, namespace, deepcopy(wanted))
            self._check_namespace(kind, obj["metadata"])
            self._set_defaults(kind, obj)
            if kind is SERVICES:
                defaults.prepare_create(obj)
            obj["status"] = validation.first_status(kind, obj) or obj.get("status", {})
            if not kind.has_status:
                del obj["status"]
            return self._store_new(kind, obj, owners, write)
        self._check_uid(kind, stored.object, wanted["metadata"])
        owners = read_owners(stored.object["metadata"].get("managedFields") or [])
        result = self._apply(kind, stored.object, wanted, owners, manager, force=write.force)
        return self._replace(kind, stored, deepcopy(result.object), write, result.owners)

    def _apply(
        self,
        kind: Kind,
        live: Object,
        wanted: Object,
        owners: Owners,
        manager: Manager,
        *,
        force: bool,
    ) -> Applied:
        try:
            return apply(
                live, wanted, owners, manager, shape=shape_of(kind), force=force, time=self._time()
            )
        except Duplicates as problem:
            what = (
                f"{wanted['metadata'].get('namespace', '')}/{wanted['metadata']['name']}; "
                f"{kind.group}/{kind.version}"
            )
            message = f"failed to create typed patch object ({what}, Kind={kind.kind}): {problem}"
            raise failure.storage_error(500, message) from problem

    def _replace(
        self, kind: Kind, stored: Stored, wanted: Object, write: Write, owners: Owners | None
    ) -> Stored:
        """Make `wanted` the next state. `owners` are the owners of its fields, if apply has
        computed them; None derives them from what changed."""
        old = stored.object
        check_types(kind, wanted)
        obj = next_state(kind, old, wanted, write.subresource)
        self._check_version(kind, stored, wanted)
        if write.subresource and kind.custom is not None:
            validation.set_defaults(kind, obj)
        elif write.subresource and kind is SERVICES:
            defaults.set_status_defaults(obj)
        elif not write.subresource:
            self._set_defaults(kind, obj)
        # Owners are computed from what the client sent, so before the server keeps or drops fields
        # on the client's behalf.
        if owners is None:
            shape = shape_of(kind)
            before = read_owners(old["metadata"].get("managedFields") or [])
            manager = self._manager(kind, write, "Update")
            then, now = (leaves(state, shape, containers=True) for state in (old, obj))
            owners = record_update(before, manager, then, now, self._time())
        reservation = None
        if kind is SERVICES and not write.subresource:
            defaults.prepare_update(obj, old)
            reservation = self._reserve(obj, old, write)
        causes = self._update_causes(kind, obj, old, write)
        if causes or write.dry_run:
            if reservation is not None:
                reservation.rollback()
            if causes:
                raise failure.rejected(kind.kind, kind.group, obj["metadata"]["name"], causes)
        if kind is SERVICES:
            defaults.complete_addresses(obj)
        if _has_generation(kind) and desired(obj) != desired(old):
            obj["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1
        obj["metadata"]["managedFields"] = write_owners(owners)
        if write.dry_run:
            return Stored(obj, stored.version)
        if reservation is not None:
            reservation.commit()
        if obj == old:
            return stored
        return self._store_or_finish(kind, obj)

    def _check_version(self, kind: Kind, stored: Stored, wanted: Object) -> None:
        metadata, old = wanted["metadata"], stored.object["metadata"]
        requested = metadata.get("resourceVersion")
        if requested and requested != old["resourceVersion"]:
            raise failure.conflict(kind, old["name"], failure.MODIFIED)
        self._check_uid(kind, stored.object, metadata)

    def _check_uid(self, kind: Kind, old: Object, wanted: Object) -> None:
        requested, metadata = wanted.get("uid"), old["metadata"]
        if requested and requested != metadata["uid"]:
            raise failure.other_uid(
                kind, metadata.get("namespace", ""), metadata["name"], requested, metadata["uid"]
            )

    def _update_causes(self, kind: Kind, obj: Object, old: Object, write: Write) -> list[Cause]:
        causes = list(validation.check_metadata_update(kind, obj, old))
        if kind is SERVICES:
            check = (
                service_rules.check_service_status
                if write.subresource
                else service_rules.check_service_update
            )
            causes.extend(check(obj, old))
        elif not write.subresource or kind.custom is not None:
            causes.extend(validation.check_update(kind, obj, old))
        return causes

    def _store_or_finish(self, kind: Kind, obj: Object) -> Stored:
        """Store the state, or remove the object if it is being deleted and nothing delays the
        deletion."""
        metadata = obj["metadata"]
        waits = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds")
        if kind is CUSTOM_RESOURCE_DEFINITIONS:
            self.kinds.define(obj)
        if (
            metadata.get("deletionTimestamp")
            and not waits
            and not (kind is NAMESPACES and self._has_objects(metadata["name"]))
        ):
            return self._remove(kind, obj)
        return self.store.put(kind, obj)

    def bind(self, namespace: str, name: str, binding: Object) -> None:
        """Bind a Pod to a node (the subresource `binding`), which no update may do. Raise a
        conflict if it has a node."""
        pod = self.get(PODS, namespace, name).object
        self._check_uid(PODS, pod, binding.get("metadata") or {})
        self.store.put(PODS, bound(pod, binding, self._time()))

    def delete(
        self, kind: Kind, namespace: str, name: str, deletion: Deletion
    ) -> tuple[Stored, bool]:
        """Delete an object. Return True if it is gone, and False if it waits for finalizers or its
        grace period."""
        stored = self.get(kind, namespace, name)
        obj = stored.object
        metadata = obj["metadata"]
        for requested, field, label, hint in (
            (deletion.uid, "uid", "UID", "The object might have been deleted and then recreated"),
            (
                deletion.resource_version,
                "resourceVersion",
                "ResourceVersion",
                "The object might have been modified",
            ),
        ):
            if requested and requested != metadata[field]:
                raise failure.precondition_failed(
                    kind, name, label, requested, metadata[field], hint
                )
        if deletion.dry_run:
            return stored, True
        grace_s = grace_period_s(obj, deletion.grace_period_s) if kind is PODS else 0
        if kind is NAMESPACES:
            return self._delete_namespace(stored)
        if grace_s == 0 and not metadata.get("finalizers"):
            return self._remove(kind, obj), True
        if (
            metadata.get("deletionTimestamp")
            and metadata.get("deletionGracePeriodSeconds", 0) <= grace_s
        ):
            return stored, False
        return self.store.put(kind, self._marked(kind, obj, grace_s)), False

    def _marked(self, kind: Kind, obj: Object, grace_s: int) -> Object:
        marks = {
            "deletionTimestamp": _rfc3339(self._now() + timedelta(seconds=grace_s)),
            "deletionGracePeriodSeconds": grace_s,
        }
        if _has_generation(kind):
            marks["generation"] = obj["metadata"].get("generation", 0) + 1
        return obj | {"metadata": obj["metadata"] | marks}

    def _delete_namespace(self, stored: Stored) -> tuple[Stored, bool]:
        """Delete everything in the namespace, as the namespace controller does, then the namespace
        itself."""
        name = stored.object["metadata"]["name"]
        if name in FIRST_NAMESPACES:
            message = f'namespaces "{name}" is forbidden: this namespace may not be deleted'
            raise ApiFailure(403, "Forbidden", message, {"name": name, "kind": "namespaces"})
        if not stored.object["metadata"].get("deletionTimestamp"):
            marked = self._marked(NAMESPACES, stored.object, 0) | {
                "status": {"phase": "Terminating"}
            }
            stored = self.store.put(NAMESPACES, marked)
        for kind in self.store.kinds():
            for item in [
                item for item in self.store.all_of(kind) if kind.namespaced and item.key[0] == name
            ]:
                self.delete(kind, name, item.key[1], Deletion())
        return stored, self.store.get(NAMESPACES, "", name) is None or self._finish_namespace(name)

    def _finish_namespace(self, name: str) -> bool:
        stored = self.store.get(NAMESPACES, "", name)
        if (
            stored is None
            or not stored.object["metadata"].get("deletionTimestamp")
            or self._has_objects(name)
        ):
            return False
        if stored.object["metadata"].get("finalizers"):
            return False
        self.store.remove(NAMESPACES, stored.object)
        return True

    def _has_objects(self, namespace: str) -> bool:
        return any(
            item.key[0] == namespace
            for kind in self.store.kinds()
            if kind.namespaced
            for item in self.store.all_of(kind)
        )

    def _remove(self, kind: Kind, obj: Object) -> Stored:
        removed = self.store.remove(kind, obj)
        if (
            kind is CUSTOM_RESOURCE_DEFINITIONS
            and (custom := self.kinds.defined_by(obj)) is not None
        ):
            self.kinds.forget(obj)
            for item in self.store.all_of(custom):
                self.store.remove(custom, item.object)
            self.store.close_watchers(custom)
        if kind is SERVICES:
            self._allocator.release(obj)
        if kind.namespaced and self.get(NAMESPACES, "", removed.key[0]).object["metadata"].get(
            "deletionTimestamp"
        ):
            self._finish_namespace(removed.key[0])
        return removed

    def _manager(self, kind: Kind, write: Write, operation: str) -> Manager:
        return Manager(write.manager, operation, kind.group_version, write.subresource)

    def _time(self) -> str:
        return _rfc3339(self._now())
