"""The Lease of coordination.k8s.io/v1: only the fields that Fairlead reads. Pure values."""

import msgspec

from fairlead.kube.objects import Fields, ObjectMeta, Resource


class LeaseSpec(Fields, frozen=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(Fields, frozen=True):
    metadata: ObjectMeta
    spec: LeaseSpec = msgspec.field(default_factory=LeaseSpec)


LEASES = Resource("coordination.k8s.io/v1", "Lease", "leases", True, Lease)
