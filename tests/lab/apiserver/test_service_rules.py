"""The rules of the Service API: which Services are accepted, how they are changed, and the messages
for rejected ones.

The tables are those of upstream's tests (TestFeatureExternalTrafficPolicy,
TestValidateServiceExternalTrafficPolicy, TestValidateService, TestValidateLoadBalancerStatus).
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from tests.lab.apiserver.api import Api, Failed

from fairlead.lab.apiserver.kinds import SERVICES

Object = dict[str, Any]
Make = Callable[..., Object]

EXTERNAL = ["198.51.100.7"]
CLASS_RULE = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end "
    "with an alphanumeric "
    "character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)


async def create(api: Api, service: Object) -> Object:
    return await api.create(SERVICES, service)


async def update(api: Api, service: Object, **spec: Any) -> Object:
    """Write the Service with other fields in its spec; None removes a field."""
    changed = deepcopy(service)
    fields = changed["spec"] | spec
    changed["spec"] = {field: value for field, value in fields.items() if value is not None}
    del changed["metadata"]["resourceVersion"]
    return await api.update(SERVICES, changed["metadata"]["name"], changed)


def causes(refused: pytest.ExceptionInfo[Failed]) -> list[str]:
    return refused.value.causes


ONLY_REACHABLE = "may only be set for externally-accessible services"
ONLY_HEALTH_CHECK = (
    "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'"
)


@pytest.mark.parametrize(
    ("spec", "policy", "has_health_port"),
    [
        ({"type": "ClusterIP"}, None, False),
        ({"type": "ExternalName", "externalName": "example.com", "ports": None}, None, False),
        ({"type": "ClusterIP", "externalIPs": EXTERNAL}, "Cluster", False),
        (
            {"type": "ClusterIP", "externalIPs": EXTERNAL, "externalTrafficPolicy": "Local"},
            "Local",
            False,
        ),
        ({"type": "NodePort"}, "Cluster", False),
        ({"type": "NodePort", "externalTrafficPolicy": "Local"}, "Local", False),
        ({"type": "LoadBalancer"}, "Cluster", False),
        ({"type": "LoadBalancer", "externalTrafficPolicy": "Cluster"}, "Cluster", False),
        ({"type": "LoadBalancer", "externalTrafficPolicy": "Local"}, "Local", True),
        (
            {
                "type": "LoadBalancer",
                "externalTrafficPolicy": "Local",
                "healthCheckNodePort": 30034,
            },
            "Local",
            True,
        ),
    ],
)
async def test_valid_combinations_of_the_external_traffic_policy_are_accepted(
    api: Api, make_service: Make, spec: Object, policy: str | None, has_health_port: bool
) -> None:
    made = (await create(api, make_service(**spec)))["spec"]
    assert made.get("externalTrafficPolicy") == policy
    assert ("healthCheckNodePort" in made) == has_health_port
    if has_health_port:
        assert made["healthCheckNodePort"] == spec.get(
            "healthCheckNodePort", made["healthCheckNodePort"]
        )
        assert 30000 <= made["healthCheckNodePort"] <= 32767


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            {"type": "ClusterIP", "externalTrafficPolicy": "Local"},
            f'spec.externalTrafficPolicy: Invalid value: "Local": {ONLY_REACHABLE}',
        ),
        (
            {
                "type": "ExternalName",
                "externalName": "a.example",
                "externalTrafficPolicy": "Cluster",
            },
            f'spec.externalTrafficPolicy: Invalid value: "Cluster": {ONLY_REACHABLE}',
        ),
        (
            {"type": "NodePort", "externalTrafficPolicy": "Local", "healthCheckNodePort": 30041},
            f"spec.healthCheckNodePort: Invalid value: 30041: {ONLY_HEALTH_CHECK}",
        ),
        (
            {"externalTrafficPolicy": "Cluster", "healthCheckNodePort": 30041},
            f"spec.healthCheckNodePort: Invalid value: 30041: {ONLY_HEALTH_CHECK}",
        ),
        (
            {"externalTrafficPolicy": "Nearby"},
            'spec.externalTrafficPolicy: Unsupported value: "Nearby": supported values: '
            '"Cluster", "Local"',
        ),
        (
            {"internalTrafficPolicy": "Nearby"},
            'spec.internalTrafficPolicy: Unsupported value: "Nearby": supported values: '
            '"Cluster", "Local"',
        ),
        ({"ports": None}, "spec.ports: Required value"),
        (
            {"clusterIP": "None"},
            "spec.clusterIPs[0]: Invalid value: \"None\": may not be set to 'None' for "
            "LoadBalancer services",
        ),
        (
            {"type": "ClusterIP", "ports": [{"port": 80, "nodePort": 30040}]},
            "spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'",
        ),
        (
            {"ports": [{"port": 0}]},
            "spec.ports[0].port: Invalid value: 0: must be between 1 and 65535, inclusive",
        ),
        (
            {"ports": [{"port": 80, "protocol": "ICMP"}]},
            'spec.ports[0].protocol: Unsupported value: "ICMP": supported values: "SCTP", "TCP", '
            '"UDP"',
        ),
        (
            {"ports": [{"name": "a", "port": 80}, {"port": 81}]},
            "spec.ports[1].name: Required value",
        ),
        (
            {"ports": [{"name": "a", "port": 80}, {"name": "a", "port": 81}]},
            'spec.ports[1].name: Duplicate value: "a"',
        ),
        (
            {
                "ports": [
                    {"name": "a", "port": 80, "nodePort": 30040},
                    {"name": "b", "port": 81, "nodePort": 30040},
                ]
            },
            "spec.ports[1].nodePort: Invalid value: 30040: provided port is already allocated",
        ),
        (
            {
                "sessionAffinity": "ClientIP",
                "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 86401}},
            },
            "spec.sessionAffinityConfig.clientIP.timeoutSeconds: "
            "Invalid value: 86401: must be greater than 0 and less than 86400",
        ),
        (
            {"sessionAffinity": "Cookie"},
            'spec.sessionAffinity: Unsupported value: "Cookie": supported values: "ClientIP", '
            '"None"',
        ),
        (
            {"type": "ClusterIP", "loadBalancerSourceRanges": ["192.0.2.0/24"]},
            "spec.LoadBalancerSourceRanges: Forbidden: may only be used when `type` is "
            "'LoadBalancer'",
        ),
        (
            {"loadBalancerSourceRanges": ["192.0.2.0"]},
            'spec.LoadBalancerSourceRanges[0]: Invalid value: "192.0.2.0": must be a valid CIDR '
            "value, "
            "(e.g. 10.9.8.0/24 or 2001:db8::/64)",
        ),
        (
            {"type": "NodePort", "loadBalancerClass": "example.com/a"},
            "spec.loadBalancerClass: Forbidden: may only be used when `type` is 'LoadBalancer'",
        ),
        (
            {"loadBalancerClass": "Bad Class"},
            f'spec.loadBalancerClass: Invalid value: "Bad Class": {CLASS_RULE}',
        ),
        (
            {"type": "NodePort", "allocateLoadBalancerNodePorts": False},
            "spec.allocateLoadBalancerNodePorts: Forbidden: may only be used when `type` is "
            "'LoadBalancer'",
        ),
        (
            {"externalIPs": ["0.0.0.0"]},
            'spec.externalIPs[0]: Invalid value: "0.0.0.0": may not be unspecified (0.0.0.0)',
        ),
        (
            {"externalIPs": ["127.0.0.1"]},
            'spec.externalIPs[0]: Invalid value: "127.0.0.1": may not be in the loopback range '
            "(127.0.0.0/8, ::1/128)",
        ),
        (
            {"externalIPs": ["fe80::1"]},
            'spec.externalIPs[0]: Invalid value: "fe80::1": may not be in the link-local range '
            "(169.254.0.0/16, fe80::/10)",
        ),
        (
            {"externalIPs": ["224.0.0.9"]},
            'spec.externalIPs[0]: Invalid value: "224.0.0.9": '
            "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)",
        ),
        (
            {"type": "Balancer"},
            'spec.type: Unsupported value: "Balancer": '
            'supported values: "ClusterIP", "ExternalName", "LoadBalancer", "NodePort"',
        ),
        ({"type": "ExternalName"}, "spec.externalName: Required value"),
        (
            {"ipFamilies": ["IPv4", "IPv4"], "ipFamilyPolicy": "RequireDualStack"},
            'spec.ipFamilies[1]: Duplicate value: "IPv4"',
        ),
        (
            {
                "clusterIPs": ["10.96.0.9", "10.96.0.10"],
                "clusterIP": "10.96.0.9",
                "ipFamilyPolicy": "RequireDualStack",
            },
            'spec.clusterIPs: Invalid value: ["10.96.0.9","10.96.0.10"]: may specify no more '
            "than one IP for each IP family",
        ),
    ],
)
async def test_invalid_services_are_refused_with_the_message_of_kube_apiserver(
    api: Api, make_service: Make, spec: Object, expected: str
) -> None:
    with pytest.raises(Failed) as refused:
        await create(api, make_service(**spec))
    assert expected in causes(refused)
    assert await api.find(SERVICES, "web") is None


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ("192.0.2.1/24", "must not have bits set beyond the prefix length"),
        ("192.0.2.0/024", "must not have leading 0s in IP or prefix length"),
        ("::ffff:192.0.2.0/120", "must not have an IPv4-mapped IPv6 address"),
        ("::ffff:192.0.2.9/120", "must not have an IPv4-mapped IPv6 address"),
    ],
)
async def test_a_source_range_that_programs_read_differently_is_refused(
    api: Api, make_service: Make, ranges: str, expected: str
) -> None:
    with pytest.raises(Failed) as refused:
        await create(api, make_service(loadBalancerSourceRanges=[ranges]))
    where = "spec.LoadBalancerSourceRanges[0]"
    assert causes(refused) == [f'{where}: Invalid value: "{ranges}": {expected}']


async def test_the_source_range_annotation_is_checked_and_the_field_has_precedence(
    api: Api, make_service: Make
) -> None:
    annotation = "service.beta.kubernetes.io/load-balancer-source-ranges"
    bad = make_service()
    bad["metadata"]["annotations"] = {annotation: "192.0.2.0/24, example.com"}
    with pytest.raises(Failed) as refused:
        await create(api, deepcopy(bad))
    assert causes(refused) == [
        f'metadata.annotations[{annotation}]: Invalid value: "example.com": must be a valid CIDR '
        "value, "
        "(e.g. 10.9.8.0/24 or 2001:db8::/64)"
    ]
    bad["spec"]["loadBalancerSourceRanges"] = [" 192.0.2.0/24 "]
    assert (await create(api, bad))["spec"]["loadBalancerSourceRanges"] == [" 192.0.2.0/24 "]
    empty = make_service("empty")
    empty["metadata"]["annotations"] = {annotation: ""}
    await create(api, empty)


async def test_one_message_for_one_cause_and_a_list_for_several(
    api: Api, make_service: Make
) -> None:
    with pytest.raises(Failed) as refused:
        await create(api, make_service("x", type="ClusterIP", externalTrafficPolicy="Local"))
    assert refused.value.message == (
        'Service "x" is invalid: spec.externalTrafficPolicy: Invalid value: "Local": '
        "may only be set for externally-accessible services"
    )
    status = refused.value.status
    assert (status["code"], status["reason"], status["details"]["kind"]) == (
        422,
        "Invalid",
        "Service",
    )
    assert status["details"]["causes"][0]["reason"] == "FieldValueInvalid"
    with pytest.raises(Failed) as refused:
        await create(api, make_service("x", internalTrafficPolicy="a", externalTrafficPolicy="b"))
    assert refused.value.message.startswith(
        'Service "x" is invalid: [spec.externalTrafficPolicy: Unsupported value'
    )


async def test_fields_of_a_service_get_their_defaults(api: Api, make_service: Make) -> None:
    spec = (await create(api, make_service(sessionAffinity="ClientIP")))["spec"]
    assert spec["internalTrafficPolicy"] == "Cluster"
    assert spec["externalTrafficPolicy"] == "Cluster"
    assert spec["allocateLoadBalancerNodePorts"] is True
    assert spec["sessionAffinityConfig"] == {"clientIP": {"timeoutSeconds": 10800}}
    assert (spec["ipFamilyPolicy"], spec["ipFamilies"]) == ("SingleStack", ["IPv4"])
    port = spec["ports"][0]
    assert (port["protocol"], port["targetPort"]) == ("TCP", 80)


async def test_the_health_check_port_is_allocated_and_released_with_the_policy(
    api: Api, make_service: Make
) -> None:
    made = await create(api, make_service(externalTrafficPolicy="Local", healthCheckNodePort=30020))
    kept = await update(api, made, healthCheckNodePort=0)
    assert kept["spec"]["healthCheckNodePort"] == 30020
    with pytest.raises(Failed) as refused:
        await update(api, kept, healthCheckNodePort=30021)
    assert causes(refused) == ["spec.healthCheckNodePort: Forbidden: field is immutable"]
    away = await update(api, kept, externalTrafficPolicy="Cluster")
    assert "healthCheckNodePort" not in away["spec"]
    other = await create(
        api, make_service("other", externalTrafficPolicy="Local", healthCheckNodePort=30020)
    )
    assert other["spec"]["healthCheckNodePort"] == 30020, "the previous port was released"
    back = await update(api, away, externalTrafficPolicy="Local", healthCheckNodePort=30022)
    assert back["spec"]["healthCheckNodePort"] == 30022
    with pytest.raises(Failed) as taken:
        await create(
            api, make_service("third", externalTrafficPolicy="Local", healthCheckNodePort=30020)
        )
    assert "provided port is already allocated" in taken.value.message


async def test_the_class_cannot_change_while_the_type_stays(api: Api, make_service: Make) -> None:
    made = await create(api, make_service(loadBalancerClass="example.com/a"))
    for other in ("example.com/b", None):
        with pytest.raises(Failed) as refused:
            await update(api, made, loadBalancerClass=other)
        assert causes(refused)[0].startswith("spec.loadBalancerClass: Invalid value: ")
        assert causes(refused)[0].endswith(": may not change once set")
    plain = await create(api, make_service("plain"))
    with pytest.raises(Failed):
        await update(api, plain, loadBalancerClass="example.com/a")
    without = await update(api, made, type="NodePort")
    assert "loadBalancerClass" not in without["spec"]
    assert (await update(api, without, type="LoadBalancer", loadBalancerClass="example.com/b"))[
        "spec"
    ]["loadBalancerClass"]


async def test_a_change_of_the_type_clears_the_fields_of_the_old_type(
    api: Api, make_service: Make
) -> None:
    service = make_service(externalTrafficPolicy="Local", loadBalancerClass="example.com/a")
    service["metadata"]["finalizers"] = ["service.kubernetes.io/load-balancer-cleanup"]
    made = await create(api, service)
    status = {"loadBalancer": {"ingress": [{"ip": "192.0.2.10"}]}}
    published = await api.update(
        SERVICES, "web", deepcopy(made) | {"status": status}, subresource="status"
    )
    assert published["status"]["loadBalancer"]["ingress"] == [{"ip": "192.0.2.10", "ipMode": "VIP"}]
    changed = await update(api, published, type="ClusterIP")
    for field in (
        "healthCheckNodePort",
        "loadBalancerClass",
        "allocateLoadBalancerNodePorts",
        "externalTrafficPolicy",
    ):
        assert field not in changed["spec"], field
    assert "nodePort" not in changed["spec"]["ports"][0]
    assert changed["status"] == {"loadBalancer": {}}
    assert changed["metadata"]["finalizers"] == ["service.kubernetes.io/load-balancer-cleanup"]
    assert changed["spec"]["clusterIP"] == made["spec"]["clusterIP"]


async def test_node_ports_may_be_switched_off_and_on(api: Api, make_service: Make) -> None:
    made = await create(api, make_service(allocateLoadBalancerNodePorts=False))
    assert "nodePort" not in made["spec"]["ports"][0]
    given = await update(api, made, allocateLoadBalancerNodePorts=True)
    port = given["spec"]["ports"][0]["nodePort"]
    kept = await update(api, given, allocateLoadBalancerNodePorts=False)
    assert kept["spec"]["ports"][0]["nodePort"] == port
    requested = make_service(
        "asked", allocateLoadBalancerNodePorts=False, ports=[{"port": 80, "nodePort": 30055}]
    )
    assert (await create(api, requested))["spec"]["ports"][0]["nodePort"] == 30055


async def test_one_node_port_for_two_protocols(api: Api, make_service: Make) -> None:
    ports = [
        {"name": "t", "port": 53, "nodePort": 30053},
        {"name": "u", "port": 53, "protocol": "UDP", "nodePort": 30053},
    ]
    made = await create(api, make_service(ports=ports))
    assert [port["nodePort"] for port in made["spec"]["ports"]] == [30053, 30053]


@pytest.mark.parametrize(
    ("ingress", "expected"),
    [
        (
            {"ip": "192.0.2.010"},
            'ip: Invalid value: "192.0.2.010": must not have leading 0s',
        ),
        (
            {"ip": "::ffff:192.0.2.1"},
            'ip: Invalid value: "::ffff:192.0.2.1": must not be an IPv4-mapped IPv6 address',
        ),
        (
            {"hostname": "a.example", "ipMode": "VIP"},
            "ipMode: Forbidden: may not be specified when `ip` is not set",
        ),
        (
            {"ip": "192.0.2.1", "ipMode": "DSR"},
            'ipMode: Unsupported value: "DSR": supported values: "Proxy", "VIP"',
        ),
        (
            {"hostname": "192.0.2.1"},
            'hostname: Invalid value: "192.0.2.1": must be a DNS name, not an IP address',
        ),
    ],
)
async def test_invalid_ingress_entries_are_refused(
    api: Api, make_service: Make, ingress: Object, expected: str
) -> None:
    made = await create(api, make_service())
    with pytest.raises(Failed) as refused:
        await api.update(
            SERVICES,
            "web",
            deepcopy(made) | {"status": {"loadBalancer": {"ingress": [ingress]}}},
            subresource="status",
        )
    assert causes(refused) == [f"status.loadBalancer.ingress[0].{expected}"]


async def test_only_load_balancers_may_have_ingress_entries(api: Api, make_service: Make) -> None:
    made = await create(api, make_service(type="NodePort"))
    status = {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}
    with pytest.raises(Failed) as refused:
        await api.update(SERVICES, "web", deepcopy(made) | {"status": status}, subresource="status")
    assert causes(refused) == [
        "status.loadBalancer.ingress: Forbidden: may only be used when `spec.type` is "
        "'LoadBalancer'"
    ]


async def test_status_and_spec_of_a_service_are_written_separately(
    api: Api, make_service: Make
) -> None:
    service = make_service()
    service["status"] = {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}
    made = await create(api, service)
    assert made["status"] == {"loadBalancer": {}}
    attempt = deepcopy(made)
    attempt["spec"]["ports"][0]["port"] = 81
    attempt["status"] = {"loadBalancer": {"ingress": [{"ip": "192.0.2.1", "ipMode": "Proxy"}]}}
    attempt["metadata"]["finalizers"] = ["example.com/hold"]
    attempt["metadata"]["annotations"] = {"example.com/note": "x"}
    written = await api.update(SERVICES, "web", attempt, subresource="status")
    assert written["spec"] == made["spec"]
    assert written["status"]["loadBalancer"]["ingress"] == [{"ip": "192.0.2.1", "ipMode": "Proxy"}]
    assert written["metadata"]["finalizers"] == ["example.com/hold"]
    assert written["metadata"]["annotations"] == {"example.com/note": "x"}
    again = deepcopy(written)
    again["spec"]["ports"][0]["port"] = 82
    again["status"] = {}
    spec_written = await api.update(SERVICES, "web", again)
    assert spec_written["status"] == written["status"]


async def test_a_services_name_may_begin_with_a_number(api: Api, make_service: Make) -> None:
    """Since 1.36 (KEP-5311); before, it was a DNS-1035 label."""
    assert (await create(api, make_service("1web")))["metadata"]["name"] == "1web"


@pytest.mark.parametrize("name", ["Web", "web.shop", "a" * 64, "-web"])
async def test_a_services_name_is_a_dns_label(api: Api, make_service: Make, name: str) -> None:
    with pytest.raises(Failed) as refused:
        await create(api, make_service(name))
    assert causes(refused)[0].startswith(f'metadata.name: Invalid value: "{name}": ')


async def test_wrong_types_are_a_bad_request(api: Api, make_service: Make) -> None:
    with pytest.raises(Failed) as refused:
        await create(api, make_service(ports=[{"port": "eighty"}]))
    assert refused.value.code == 400
    assert 'Service in version "v1" cannot be handled as a Service' in refused.value.message
