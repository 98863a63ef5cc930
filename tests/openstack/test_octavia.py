"""The real Octavia answers, works, fails and waits as the tests of the driver need it."""

import pytest
from keystoneauth1.exceptions import ConnectFailure
from openstack.connection import Connection
from openstack.exceptions import ConflictException, HttpException
from tests.openstack import clients
from tests.openstack.front import Answer, Cut, Front
from tests.openstack.octavia import MemberStatus, Octavia

NETWORK = "0f1a7c1e-0000-4000-8000-000000000002"
MEMBERS = [
    {"name": f"node{number}", "address": f"10.1.0.{number}", "protocol_port": 30080}
    for number in (1, 2)
]


@pytest.fixture
def client(octavia_front: Front) -> Connection:
    return clients.without_auth(octavia=octavia_front.url)


def whole(name: str) -> dict[str, object]:
    """Create a load balancer with everything below it in one call."""
    monitor = {"type": "TCP", "delay": 5, "timeout": 3, "max_retries": 2}
    pool = {
        "name": "web",
        "protocol": "TCP",
        "lb_algorithm": "ROUND_ROBIN",
        "members": MEMBERS,
        "healthmonitor": monitor,
    }
    listener = {"name": "web", "protocol": "TCP", "protocol_port": 80, "default_pool": pool}
    return {
        "name": name,
        "vip_network_id": NETWORK,
        "tags": [f"is={name}"],
        "listeners": [listener],
    }


def test_a_balancer_lives(client: Connection, octavia_front: Front) -> None:
    made = client.load_balancer.create_load_balancer(**whole("lives"))
    assert made.provisioning_status == "PENDING_CREATE"
    assert clients.settled(client, made.id) == "ACTIVE"
    (found,) = client.load_balancer.load_balancers(tags=["is=lives"])
    assert (found.id, found.project_id) == (made.id, octavia_front.project)
    (pool,) = client.load_balancer.pools(loadbalancer_id=made.id)
    assert sorted(member.address for member in client.load_balancer.members(pool.id)) == [
        "10.1.0.1",
        "10.1.0.2",
    ]
    client.load_balancer.delete_load_balancer(made.id, cascade=True)
    assert clients.settled(client, made.id) == "DELETED"
    assert [str(call) for call in octavia_front.writes] == [
        "POST /v2/lbaas/loadbalancers",
        f"DELETE /v2/lbaas/loadbalancers/{made.id}?cascade=True",
    ]
    assert [call.status for call in octavia_front.writes] == [201, 204]


def test_what_is_held_is_pending_and_refuses_writes(client: Connection, octavia: Octavia) -> None:
    with octavia.holding("boot"):
        made = client.load_balancer.create_load_balancer(**whole("held"))
        with pytest.raises(ConflictException, match="Invalid state PENDING_CREATE"):
            client.load_balancer.update_load_balancer(made.id, description="changed")
        assert (
            client.load_balancer.get_load_balancer(made.id).provisioning_status == "PENDING_CREATE"
        )
    assert clients.settled(client, made.id) == "ACTIVE"


def test_a_machine_that_is_not_had_leaves_a_balancer_in_error(
    client: Connection, octavia: Octavia
) -> None:
    with octavia.failing("boot"):
        made = client.load_balancer.create_load_balancer(**whole("no-machine"))
        assert clients.settled(client, made.id) == "ERROR"
    client.load_balancer.failover_load_balancer(made.id)
    assert clients.settled(client, made.id) == "ACTIVE"


def test_a_machine_that_takes_no_orders_leaves_a_listener_in_error(
    client: Connection, octavia: Octavia
) -> None:
    made = client.load_balancer.create_load_balancer(**whole("no-orders"))
    clients.settled(client, made.id)
    (listener,) = client.load_balancer.listeners(load_balancer_id=made.id)
    with octavia.failing("configure"):
        client.load_balancer.update_listener(listener.id, connection_limit=7)
        assert clients.settled(client, made.id) == "ACTIVE"
    assert client.load_balancer.get_listener(listener.id).provisioning_status == "ERROR"
    client.load_balancer.update_listener(listener.id, connection_limit=7)
    clients.settled(client, made.id)
    assert client.load_balancer.get_listener(listener.id).provisioning_status == "ACTIVE"


def test_an_answer_is_lost_though_all_was_done(client: Connection, octavia_front: Front) -> None:
    octavia_front.at(1, Cut(after=True))
    with pytest.raises(ConnectFailure):
        client.load_balancer.create_load_balancer(**whole("lost"))
    assert [call.status for call in octavia_front.writes] == [201]
    (made,) = client.load_balancer.load_balancers(tags=["is=lost"])
    assert clients.settled(client, made.id) == "ACTIVE"


def test_a_call_is_lost_before_anything_was_done(client: Connection, octavia_front: Front) -> None:
    octavia_front.at(1, Cut(after=False))
    with pytest.raises(ConnectFailure):
        client.load_balancer.create_load_balancer(**whole("unheard"))
    assert list(client.load_balancer.load_balancers(tags=["is=unheard"])) == []


def test_the_front_answers_itself(client: Connection, octavia_front: Front) -> None:
    octavia_front.at(1, Answer(503, "upgrade", {"Retry-After": "1"}))
    with pytest.raises(HttpException, match="upgrade") as refused:
        client.load_balancer.create_load_balancer(**whole("unserved"))
    assert refused.value.status_code == 503


@pytest.fixture
def alive(client: Connection) -> str:
    made = client.load_balancer.create_load_balancer(**whole("alive"))
    clients.settled(client, made.id)
    return str(made.id)


def test_members_are_as_their_amphora_says(
    client: Connection, octavia: Octavia, alive: str
) -> None:
    (amphora,) = client.load_balancer.amphorae(loadbalancer_id=alive)
    (listener,) = client.load_balancer.listeners(load_balancer_id=alive)
    (pool,) = client.load_balancer.pools(loadbalancer_id=alive)
    first, second = sorted(
        client.load_balancer.members(pool.id), key=lambda member: str(member.address)
    )

    def become(said: MemberStatus, *expected: str) -> None:
        """Report the second member's status as its amphora; wait until the load balancer, the first
        and the second member have the expected statuses."""
        octavia.heartbeat(amphora.id, {(pool.id, listener.id): {first.id: "UP", second.id: said}})
        clients.until(lambda: statuses() == list(expected))

    def statuses() -> list[str]:
        members = [client.load_balancer.get_member(each.id, pool.id) for each in (first, second)]
        return [
            each.operating_status
            for each in (client.load_balancer.get_load_balancer(alive), *members)
        ]

    become("UP", "ONLINE", "ONLINE", "ONLINE")
    become("DOWN", "DEGRADED", "ONLINE", "ERROR")
    become("UP", "ONLINE", "ONLINE", "ONLINE")
