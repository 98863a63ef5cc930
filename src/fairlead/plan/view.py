"""The part of a cluster's state that plans read.

Every role provides a `Cluster`. The controller also provides an `Addressed` cluster, because it
assigns addresses, and a `CloudCluster`, because it watches a cloud. `fairlead.state.State`
implements all of them. Pure."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from fairlead.kube.crds import AddressGrant, AddressPool, BGPPeer
from fairlead.kube.objects import EndpointSlice, Node, Service
from fairlead.model import ExistingLoadBalancer, ServiceKey, Verdict
from fairlead.plan.announcers import Announcers
from fairlead.plan.gateways import Gateways


class Cluster(Protocol):
    """The objects and the verdicts of probes that every plan reads. `node_changes` grows with each
    change of a node, of `yields` and of `takers`: see plan/yielding.py. `pools` is a new object
    after each change of a pool; it is empty in a role that announces no addresses. `bgp_peers`:
    None if they cannot be read."""

    @property
    def services(self) -> Mapping[ServiceKey, Service]: ...

    @property
    def nodes(self) -> Mapping[str, Node]: ...

    @property
    def node_changes(self) -> int: ...

    @property
    def yields(self) -> bool: ...

    @property
    def takers(self) -> frozenset[str] | None: ...

    @property
    def bgp_peers(self) -> Mapping[str, BGPPeer] | None: ...

    @property
    def pools(self) -> Mapping[str, AddressPool]: ...

    def slices_of(self, key: ServiceKey) -> Sequence[EndpointSlice]: ...

    def verdict_of(self, address: str, port: int) -> Verdict | None: ...

    def showing(self, address: str) -> Collection[ServiceKey]: ...


class Addressed(Cluster, Protocol):
    """The additional state that the controller reads to assign addresses."""

    @property
    def granted(self) -> Collection[ServiceKey]: ...

    def grants_of(self, key: ServiceKey) -> Sequence[AddressGrant]: ...

    def namespace_labels(self, namespace: str) -> Mapping[str, str]: ...

    @property
    def gateways(self) -> Gateways | None: ...

    @property
    def announcers(self) -> Announcers | None: ...


class CloudCluster(Cluster, Protocol):
    """The additional state that the plan of a cloud reads: the load balancers of Services there."""

    @property
    def load_balancers(self) -> Mapping[ServiceKey, ExistingLoadBalancer]: ...
