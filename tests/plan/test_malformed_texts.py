"""Malformed text in any object does not prevent the plan of the other Services.

Old API servers accepted values that present ones reject, users may edit the CRDs of Fairlead, and
annotations may contain any text."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.makers import plan_gateway

from fairlead.config import Config, PoolConfig
from fairlead.errors import Refused
from fairlead.kube.crds import AddressGrant, AddressPool
from fairlead.kube.objects import EndpointSlice, Node, ObjectKey, Service
from fairlead.model import LoadBalancer
from fairlead.plan.cluster import plan_controller, plan_node
from fairlead.plan.ledger import Ledger
from fairlead.state import State

CONFIG = Config(
    default_class="fairlead.io/direct", pools=(PoolConfig("main", ("203.0.113.0/28",)),)
)
MALFORMED = st.one_of(
    st.sampled_from(
        [
            "",
            "010.1.1.1",
            "010.0.0.0/8",
            "1.2.3.4/33",
            "203.0.113.1",
            "203.0.113.01",
            "::1",
            "2001:DB8::1",
            "::1%eth0",
            "::ffff:1.2.3.4",
            "a,b",
            "-",
            "x/8",
        ]
    ),
    st.text("0193.:/-,ax %", max_size=8),
)
ANNOTATIONS = (
    "fairlead.io/addresses",
    "fairlead.io/address-pool",
    "fairlead.io/sharing-key",
    "fairlead.io/keep-address",
    "metallb.io/loadBalancerIPs",
    "loadbalancer.openstack.org/proxy-protocol",
    "service.beta.kubernetes.io/load-balancer-source-ranges",
)


@st.composite
def services(draw: st.DrawFn) -> Service:
    ips = draw(st.lists(MALFORMED, max_size=2))
    return msgspec.convert(
        {
            "metadata": {
                "name": "malformed",
                "namespace": "default",
                "uid": "uid-malformed",
                "resourceVersion": draw(MALFORMED),
                "annotations": draw(
                    st.fixed_dictionaries({}, optional=dict.fromkeys(ANNOTATIONS, MALFORMED))
                ),
            },
            "spec": {
                "type": "LoadBalancer",
                "clusterIP": "10.96.0.1",
                "clusterIPs": ["10.96.0.1"],
                "ports": [{"port": 80}],
                "loadBalancerIP": draw(MALFORMED),
                "loadBalancerSourceRanges": draw(st.lists(MALFORMED, max_size=2)),
            },
            "status": {"loadBalancer": {"ingress": [{"ip": ip} for ip in ips]}},
        },
        Service,
    )


GRANTS = st.builds(
    lambda name, address, version: msgspec.convert(
        {
            "metadata": {"name": name},
            "spec": {
                "address": address,
                "holders": [
                    {
                        "namespace": "default",
                        "name": "malformed",
                        "uid": "uid-malformed",
                        "serviceVersion": version,
                    }
                ],
            },
        },
        AddressGrant,
    ),
    st.sampled_from(["203.0.113.1", "x"]),
    MALFORMED,
    MALFORMED,
)
POOLS = st.builds(
    lambda texts: msgspec.convert(
        {"metadata": {"name": "other"}, "spec": {"addresses": texts}}, AddressPool
    ),
    st.lists(MALFORMED, max_size=2),
)
VALID = msgspec.convert(
    {
        "metadata": {"name": "valid", "namespace": "default", "uid": "uid-valid"},
        "spec": {
            "type": "LoadBalancer",
            "clusterIP": "10.96.0.2",
            "clusterIPs": ["10.96.0.2"],
            "ports": [{"port": 80}],
        },
    },
    Service,
)


@given(services(), GRANTS, POOLS, st.lists(MALFORMED, max_size=2))
def test_a_valid_service_is_planned_beside_malformed_objects(
    malformed: Service, grant: AddressGrant, pool: AddressPool, cidrs: list[str]
) -> None:
    state = State(())
    node = msgspec.convert({"metadata": {"name": "node1"}, "spec": {"podCIDRs": cidrs}}, Node)
    state.update_nodes({ObjectKey("", "node1"): node})
    state.update_grants({ObjectKey("", grant.metadata.name): grant})
    state.update_pools({ObjectKey("", "other"): pool})
    state.update_services({ObjectKey(*each.key): each for each in (malformed, VALID)})
    state.update_slices(
        {
            ObjectKey("default", "none"): msgspec.convert(
                {"metadata": {"name": "none"}, "addressType": "IPv4"}, EndpointSlice
            )
        }
    )
    planned = plan_controller(state, CONFIG, Ledger(), state.services)
    assert isinstance(planned[VALID.key], LoadBalancer)
    assert isinstance(planned[malformed.key], LoadBalancer | Refused)
    plan_gateway(state, CONFIG, state.services)
    assert not isinstance(plan_node(state, "node1", state.services)[VALID.key], Refused)
