"""What plans read of a cluster.

`Cluster` is what every role knows, `Addressed` what the controller knows besides, to give
addresses. `fairlead.state.State` is both."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from fairlead.kube.objects import EndpointSlice, Node, Service
from fairlead.kube.own import AddressGrant, AddressPool
from fairlead.model import ServiceKey, Verdict
from fairlead.plan.gateways import Gateways


class Cluster(Protocol):
    """What is, as far as plans read it."""

    @property
    def services(self) -> Mapping[ServiceKey, Service]: ...

    @property
    def nodes(self) -> Mapping[str, Node]: ...

    def slices_of(self, key: ServiceKey) -> Sequence[EndpointSlice]: ...

    def verdict_of(self, address: str, port: int) -> Verdict | None: ...

    def showing(self, address: str) -> Collection[ServiceKey]: ...


class Addressed(Cluster, Protocol):
    """What the controller reads besides, to give addresses. `pools` is another object whenever a
    pool is another one."""

    @property
    def pools(self) -> Mapping[str, AddressPool]: ...

    @property
    def granted(self) -> Collection[ServiceKey]: ...

    def grants_of(self, key: ServiceKey) -> Sequence[AddressGrant]: ...

    def namespace_labels(self, namespace: str) -> Mapping[str, str]: ...

    @property
    def gateways(self) -> Gateways | None: ...
