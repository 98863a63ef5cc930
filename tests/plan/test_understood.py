"""A value of an annotation that is not understood changes nothing: the last value that was
understood stays in force, in every class, for every annotation and in every role."""

import msgspec
import pytest

from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.kube.objects import (
    FieldsManager,
    LoadBalancerIngress,
    LoadBalancerStatus,
    Service,
    ServiceMeta,
    ServicePort,
    ServiceSpec,
    ServiceStatus,
)
from fairlead.model import LoadBalancer
from fairlead.plan.addresses import address_request_of, keeps
from fairlead.plan.annotation_reader import Values
from fairlead.plan.annotations import KEEP_ADDRESS, MAX_VALUE_LENGTH, READ, RECORD
from fairlead.plan.balancer import plan_unconfirmed
from fairlead.plan.classes import CLASSES, PROXY, ServiceClass
from fairlead.plan.projection import balanced_service, whole_service
from fairlead.plan.service import CLAIM_MANAGER, CLASS_ANNOTATION
from fairlead.plan.terms import ServiceContext
from fairlead.plan.understood import in_force, record_of
from fairlead.sections import OctaviaClassConfig, OctaviaConfig

CONFIG = Config(octavia=OctaviaConfig(subnet_id="subnet", classes={"gold": OctaviaClassConfig()}))
FREE_TEXT = "x" * (MAX_VALUE_LENGTH + 1)
ID = "038c7b3d-e40a-4b72-a4b5-e45c520f23e1"
VALID = {
    "addresses": "203.0.113.7",
    "address-pool": "main",
    "sharing-key": "key",
    "keep-address": "true",
    "internal": "true",
    "drain-timeout": "5m",
    "hostname-suffix": "nip.io",
    "hostname": "www.example.org",
    "proxy-protocol": "v2",
    "x-forwarded-for": "true",
    "timeout-client-data": "50s",
    "timeout-member-connect": "5000",
    "timeout-member-data": "50s",
    "timeout-tcp-inspect": "10",
    "connection-limit": "100",
    "lb-method": "source-ip",
    "enable-health-monitor": "true",
    "health-monitor-delay": "7",
    "health-monitor-timeout": "7",
    "health-monitor-max-retries": "7",
    "health-monitor-max-retries-down": "7",
    "octavia-provider": "amphora",
    "members": "all",
    "node-selector": "zone=a",
    "class": "gold",
    "load-balancer-id": ID,
}
"""By short name, a value that is understood. Every other annotation takes any short text."""
OTHER = {"v2": "false", "true": "false"}
"""By value, another value of the same annotations."""
CASES = [
    pytest.param(class_, values, id=f"{class_.name} {values.names[0]}")
    for class_ in CLASSES.values()
    for values in class_.values
]


def service(annotations: dict[str, str], *, claimed: bool = True) -> Service:
    manager = (FieldsManager(CLAIM_MANAGER),) if claimed else ()
    claim = {CLASS_ANNOTATION: "fairlead.io/direct"} if claimed else {}
    meta = ServiceMeta(
        "web", "default", "uid", annotations=annotations | claim, managed_fields=manager
    )
    ports = (ServicePort(80, node_port=30080),)
    spec = ServiceSpec("LoadBalancer", ports, cluster_ips=("10.96.0.1",))
    status = ServiceStatus(LoadBalancerStatus((LoadBalancerIngress("203.0.113.10"),)))
    return Service(meta, spec, status)


def plan(service: Service, class_: ServiceClass, *, at_gateway: bool = False) -> LoadBalancer:
    projected = balanced_service(service) if at_gateway else whole_service(service)
    assert projected is not None
    context = ServiceContext(projected, CONFIG, {}, ["203.0.113.10"])
    return plan_unconfirmed(context, (), class_, at_gateway=at_gateway).balancer


def served(service: Service, class_: ServiceClass) -> list[object]:
    """Return how every role serves the Service, without the Findings."""
    roles = [False, True] if class_.served_by == "gateways" else [False]
    plans = [plan(service, class_, at_gateway=role) for role in roles]
    settings = [msgspec.structs.replace(each, notes=()) for each in plans]
    return [*settings, address_request_of(service), keeps(service)]


def valid(values: Values[object]) -> str:
    return VALID.get(values.names[0].partition("/")[2], "text")


def invalid(values: Values[object]) -> str:
    return FREE_TEXT if values.parse("?!") is not None else "?!"


@pytest.mark.parametrize(("class_", "values"), CASES)
def test_the_last_value_that_was_understood_stays_in_force(
    class_: ServiceClass, values: Values[object]
) -> None:
    name = values.names[0]
    good = service({name: valid(values)})
    record = record_of(good, class_.values)
    assert msgspec.json.decode(record) == {name: valid(values)}
    for spelled in values.names:
        wrong = service({spelled: invalid(values), RECORD: record})
        assert served(wrong, class_) == served(good, class_)
        assert record_of(wrong, class_.values) == record, "the record lasts"
        (note,) = [n for n in plan(wrong, class_).notes if n.code == "AnnotationNotUnderstood"]
        assert spelled in note.message
        assert "stays in force" in note.message


@pytest.mark.parametrize(("class_", "values"), CASES)
def test_a_live_service_stays_without_an_annotation_that_was_never_understood(
    class_: ServiceClass, values: Values[object]
) -> None:
    wrong = service({values.names[0]: invalid(values)})
    assert served(wrong, class_) == served(service({}), class_)
    assert record_of(wrong, class_.values) == ""
    assert any("served as before" in each.message for each in plan(wrong, class_).notes)


@pytest.mark.parametrize("blank", ["", "  "])
@pytest.mark.parametrize(("class_", "values"), CASES)
def test_a_blank_value_is_not_understood_unless_the_annotation_takes_any_text_or_a_list(
    class_: ServiceClass, values: Values[object], blank: str
) -> None:
    good = service({values.names[0]: valid(values)})
    record = record_of(good, class_.values)
    may_be_blank = values.parse("?!") is not None or values.names[0] == "fairlead.io/addresses"
    for number, spelled in enumerate(values.names):
        empty = service({spelled: blank, RECORD: record})
        if may_be_blank:
            assert served(empty, class_) == served(service({}), class_)
            assert record_of(empty, class_.values) == ""
            continue
        # Equivalent annotations of other systems do not count beside it.
        others = dict.fromkeys(values.names[number + 1 :], OTHER.get(valid(values), "1"))
        empty = service({**others, spelled: blank, RECORD: record})
        assert served(empty, class_) == served(good, class_)
        assert record_of(empty, class_.values) == record, "the record lasts"
        (note,) = [n for n in plan(empty, class_).notes if n.code == "AnnotationNotUnderstood"]
        assert f"{spelled} is ''" in note.message
        with pytest.raises(Refused, match=spelled):
            plan(service({spelled: blank}, claimed=False), class_)


@pytest.mark.parametrize(("class_", "values"), CASES)
def test_a_new_service_with_a_value_that_is_not_understood_is_refused(
    class_: ServiceClass, values: Values[object]
) -> None:
    for record in ({}, {RECORD: "{"}, {RECORD: "[]"}):
        wrong = service({values.names[0]: invalid(values), **record}, claimed=False)
        with pytest.raises(Refused, match=values.names[0]):
            plan(wrong, class_)


def test_a_record_without_a_value_of_the_class_is_not_used() -> None:
    for record in ("", "{", "[]", '{"fairlead.io/proxy-protocol": "v3"}', '{"a": 1}'):
        wrong = service({"fairlead.io/proxy-protocol": "v22", RECORD: record})
        assert served(wrong, PROXY) == served(service({}), PROXY)


def test_a_misspelled_header_changes_nothing_and_other_annotations_still_do() -> None:
    record = record_of(service({"fairlead.io/proxy-protocol": "v2"}), PROXY.values)
    wrong = service(
        {
            "loadbalancer.openstack.org/proxy-protocol": "v22",
            "fairlead.io/connection-limit": "7",
            RECORD: record,
        }
    )
    right = service({"fairlead.io/proxy-protocol": "v2", "fairlead.io/connection-limit": "7"})
    assert served(wrong, PROXY) == served(right, PROXY)
    assert record_of(wrong, PROXY.values) == record_of(right, PROXY.values)


def test_the_address_of_a_service_without_an_understood_value_is_kept() -> None:
    name = KEEP_ADDRESS[0]
    assert keeps(service({name: "yes"}, claimed=False)), "a released address is lost"
    assert not keeps(service({name: "yes"}))
    assert keeps(service({name: "yes", RECORD: f'{{"{name}":"true"}}'}))
    assert not keeps(service({name: "yes", RECORD: f'{{"{name}":"false"}}'}))


def test_every_annotation_that_is_read_is_in_the_table_of_a_class() -> None:
    tables = {name for each in CLASSES.values() for values in each.values for name in values.names}
    assert READ - tables == {"loadbalancer.openstack.org/load-balancer-address"}


def test_a_service_whose_values_are_understood_is_the_same_object() -> None:
    good = service({"fairlead.io/proxy-protocol": "v2"})
    assert in_force(good, PROXY.values) == (good, ())
    assert in_force(good, PROXY.values)[0] is good
