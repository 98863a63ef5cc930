"""Steps for states that are hard to provoke at a real Octavia: objects in ERROR, pending objects,
objects of another Service."""

import msgspec
from tests.drivers.octavia.site import WEB, planned, service, settings

from fairlead.drivers.octavia.balancers import (
    ACTIVE,
    ERROR,
    BalancerState,
    Found,
    FoundMember,
    FoundPool,
    Member,
)
from fairlead.drivers.octavia.changes import Blocked, Call
from fairlead.drivers.octavia.diff import MAX_ATTEMPTS, diff, existing_of
from fairlead.drivers.octavia.marks import Owner
from fairlead.drivers.octavia.members import members_step
from fairlead.drivers.octavia.render import specs_of

ADDRESS = "198.51.100.7"
(WANTED,) = specs_of(
    {WEB: planned(service(addresses=(ADDRESS,)))}, Owner("cluster", "test")
).values()


def tree(id_: str = "a", **fields: object) -> BalancerState:
    found = BalancerState(
        id_,
        WEB,
        "uid-web",
        ACTIVE,
        "amphora",
        ADDRESS,
        WANTED.name,
        WANTED.description,
        WANTED.tags,
    )
    return msgspec.structs.replace(found, **fields)


def steps(*trees: BalancerState, attempts: int = 0, wanted: bool = True) -> list[str]:
    found = diff({WEB: WANTED} if wanted else {}, {WEB: Found(trees, attempts)})
    texts = []
    for step in found:
        match step:
            case Call():
                texts.append(f"{step.method} {step.path}")
            case Blocked():
                texts.append(f"{step.outcome.state}: {step.outcome.message}")
    return texts


def pool(*nodes: int, weight: int = 1, status: str = ACTIVE) -> FoundPool:
    """Return the pool of port 80 with members on these nodes."""
    (of,) = (each.pool for each in WANTED.listeners)
    members = tuple(
        FoundMember(
            f"m{node}", status, Member(f"10.1.0.{node}", 30080, weight, of.members[0].monitor_port)
        )
        for node in nodes
    )
    return FoundPool("p", ACTIVE, "TCP-80-TCP", "TCP", of.method, members=members)


def members(found: FoundPool, *nodes: int) -> tuple[str, list[str]] | None:
    """Return the write that sets members of weight 1, and the nodes that it lists."""
    step = members_step(WEB, tree(), found, [each.member for each in pool(*nodes).members])
    if step is None:
        return None
    body = msgspec.json.decode(msgspec.json.encode(step.body or {}))
    return f"{step.method} {step.path}", [each["address"] for each in body.get("members", [])]


CREATE = "POST loadbalancers"
ALL = "PUT pools/p/members"


def test_a_change_of_one_member_writes_only_this_member() -> None:
    fifty = range(1, 51)
    assert members(pool(*fifty), *fifty) is None
    assert members(pool(*fifty), *fifty, 51) == ("POST pools/p/members", [])
    assert members(pool(*fifty, 51), *fifty) == ("DELETE pools/p/members/m51", [])
    assert members(pool(1, weight=2), 1) == ("PUT pools/p/members/m1", [])


def test_a_change_of_several_members_is_one_write_of_all_members() -> None:
    assert members(pool(), 1) == (ALL, ["10.1.0.1"])
    assert members(pool(1), 1, 2, 3) == (ALL, ["10.1.0.1", "10.1.0.2", "10.1.0.3"])
    assert members(pool(1, 2, 3), 1) == (ALL, ["10.1.0.1"])
    assert members(pool(1, 2), 2, 3) == (ALL, ["10.1.0.2", "10.1.0.3"])
    assert members(pool(1, 2, weight=2), 1, 2) == (ALL, ["10.1.0.1", "10.1.0.2"])


def test_a_broken_member_causes_a_write_of_all_members() -> None:
    assert members(pool(1, status=ERROR), 1) == (ALL, ["10.1.0.1"])
    assert members(pool(1, 2, status=ERROR), 1) == (ALL, ["10.1.0.1"])
    twice = msgspec.structs.replace(pool(1), members=pool(1).members * 2)
    assert members(twice, 1) == (ALL, ["10.1.0.1"])


def test_a_broken_load_balancer_that_has_served_is_failed_over_first_and_recreated_next() -> None:
    broken = tree(status=ERROR)
    assert steps(broken) == ["PUT loadbalancers/a/failover"]
    assert steps(broken, attempts=1) == ["DELETE loadbalancers/a?cascade=true", CREATE]
    (message,) = steps(broken, attempts=MAX_ATTEMPTS)
    assert message.startswith("unavailable: load balancer a is in ERROR, 5 attempts to repair it")
    (message,) = steps(attempts=MAX_ATTEMPTS)
    assert message.startswith("unavailable: Octavia has failed 5 times to create a load balancer")
    assert steps(attempts=1, wanted=False) == []
    assert steps(broken, wanted=False, attempts=MAX_ATTEMPTS) == [
        "DELETE loadbalancers/a?cascade=true"
    ]


def test_a_broken_load_balancer_that_is_unpublished_or_of_provider_ovn_is_recreated_at_once() -> (
    None
):
    recreated = ["DELETE loadbalancers/a?cascade=true", CREATE]
    assert steps(tree(status=ERROR, address="198.51.100.8")) == recreated
    assert steps(tree(status=ERROR, provider="ovn")) == recreated


def test_a_load_balancer_is_recreated_with_the_published_address() -> None:
    create = next(step for step in diff({WEB: WANTED}, {}) if isinstance(step, Call))
    body = msgspec.json.decode(msgspec.json.encode(create.body))["loadbalancer"]
    assert body["vip_address"] == ADDRESS
    assert [each["name"] for each in body["listeners"]] == ["TCP-80"]


def test_no_step_is_taken_while_octavia_is_working_on_the_load_balancer() -> None:
    at_work = tree("b", status="PENDING_UPDATE")
    waiting = ["waiting: Octavia is working on load balancer b (PENDING_UPDATE)"]
    assert steps(tree(), at_work) == waiting
    assert steps(at_work, wanted=False) == waiting


def test_of_several_load_balancers_the_working_one_stays() -> None:
    broken, working = tree("a", status=ERROR, created="1"), tree("b", created="2")
    assert steps(broken, working)[0] == "DELETE loadbalancers/a?cascade=true"
    assert not any("loadbalancers/b?" in step or step == CREATE for step in steps(broken, working))


def test_the_load_balancer_of_a_previous_service_of_the_same_name_is_deleted_first() -> None:
    assert steps(tree(uid="uid-before")) == [
        "DELETE loadbalancers/a?cascade=true",
        CREATE,
    ]


def test_a_plan_for_another_provider_than_that_of_the_load_balancer_is_repeated() -> None:
    (message,) = steps(tree(provider="ovn"))
    assert message.startswith(
        "waiting: the Service is planned again, because its load balancer a is of provider ovn"
    )


def test_a_plan_that_does_not_contain_the_existing_load_balancer_is_repeated() -> None:
    """The Service is planned again although no write is necessary, because the next drivers rely on
    the plan."""
    (wanted,) = specs_of(
        {WEB: service(octavia=settings(checks=None, monitor_types=()))}, Owner("cluster", "test")
    ).values()
    found = tree()
    bare = msgspec.structs.replace(wanted, listeners=())
    (step,) = diff({WEB: bare}, {WEB: Found((found,))})
    assert isinstance(step, Blocked)
    assert "the Service is planned again" in step.outcome.message
    known = msgspec.structs.replace(bare, existing=existing_of(found))
    assert diff({WEB: known}, {WEB: Found((found,))}) == []


def test_a_write_without_effect_is_reported_and_not_repeated_at_once() -> None:
    (write,) = diff({WEB: WANTED}, {WEB: Found(())})
    (step,) = diff({WEB: WANTED}, {WEB: Found((), after=(write,))})
    assert isinstance(step, Blocked)
    assert step.outcome.state == "unavailable"
    assert step.outcome.message == f"Octavia accepted a write without effect: {write}"
