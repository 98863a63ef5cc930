"""The fields of Endpoints, as types (core/v1). EndpointSlices have replaced them, but older clients
still read them.

Values only, as in `fields`. They are in a separate module because `EndpointPort` is the name of two
definitions. Follows the API reference of Kubernetes 1.36.
"""

from fairlead.kube.rules.fields import Fields, KindFields, ObjectReference


class EndpointAddress(Fields):
    ip: str | None = None
    hostname: str | None = None
    node_name: str | None = None
    target_ref: ObjectReference | None = None


class EndpointPort(Fields):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None
    app_protocol: str | None = None


class EndpointSubset(Fields):
    addresses: list[EndpointAddress] | None = None
    not_ready_addresses: list[EndpointAddress] | None = None
    ports: list[EndpointPort] | None = None


class Endpoints(KindFields):
    subsets: list[EndpointSubset] | None = None
