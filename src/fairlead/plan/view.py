"""The part of a cluster's state that plans read.

Every role provides a `Cluster`. The controller also provides an `Addressed` cluster, because it
assigns addresses, and a `CloudCluster`, because it watches a cloud. `fairlead.state.State`
implements all of them. Pure."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from fairlead.kube.crds import AddressGrant, AddressPool
from fairlead.kube.objects import EndpointSlice, Node, Service
from fairlead.model import ExistingLoadBalancer, ServiceKey, Verdict
from fairlead.plan.exclusions import Exclusions
from fairlead.plan.gateways import Gateways


class Cluster(Protocol):
    """The objects and the verdicts of probes that every plan reads."""

    @property
    def services(self) -> Mapping[ServiceKey, Service]: ...

    @property
    def nodes(self) -> Mapping[str, Node]: ...

    def slices_of(self, key: ServiceKey) -> Sequence[EndpointSlice]: ...

    def verdict_of(self, address: str, port: int) -> Verdict | None: ...

    def showing(self, address: str) -> Collection[ServiceKey]: ...

    @property
    def exclusions(self) -> Exclusions: ...


class Addressed(Cluster, Protocol):
    """The additional state that the controller reads to assign addresses. `pools` is a new object
    after each change of a pool."""

    @property
    def pools(self) -> Mapping[str, AddressPool]: ...

    @property
    def granted(self) -> Collection[ServiceKey]: ...

    def grants_of(self, key: ServiceKey) -> Sequence[AddressGrant]: ...

    def namespace_labels(self, namespace: str) -> Mapping[str, str]: ...

    @property
    def gateways(self) -> Gateways | None: ...


class CloudCluster(Cluster, Protocol):
    """The additional state that the plan of a cloud reads: the load balancers of Services there."""

    @property
    def load_balancers(self) -> Mapping[ServiceKey, ExistingLoadBalancer]: ...
