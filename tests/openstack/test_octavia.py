"""The real Octavia, and the faults and delays that the tests of the driver inject into it."""

import pytest
from keystoneauth1.exceptions import ConnectFailure
from openstack.connection import Connection
from openstack.exceptions import ConflictException, HttpException
from tests.openstack import clients
from tests.openstack.fault_proxy import Disconnect, ErrorResponse, FaultProxy
from tests.openstack.octavia import MemberStatus, Octavia

NETWORK = "0f1a7c1e-0000-4000-8000-000000000002"
MEMBERS = [
    {"name": f"node{number}", "address": f"10.1.0.{number}", "protocol_port": 30080}
    for number in (1, 2)
]


@pytest.fixture
def client(octavia_proxy: FaultProxy) -> Connection:
    return clients.without_auth(octavia=octavia_proxy.url)


def whole(name: str) -> dict[str, object]:
    """Return the arguments that create a load balancer and all its parts in one call."""
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


def test_a_load_balancer_is_created_and_deleted(
    client: Connection, octavia_proxy: FaultProxy
) -> None:
    made = client.load_balancer.create_load_balancer(**whole("created"))
    assert made.provisioning_status == "PENDING_CREATE"
    assert clients.wait_settled(client, made.id) == "ACTIVE"
    (found,) = client.load_balancer.load_balancers(tags=["is=created"])
    assert (found.id, found.project_id) == (made.id, octavia_proxy.project)
    (pool,) = client.load_balancer.pools(loadbalancer_id=made.id)
    assert sorted(member.address for member in client.load_balancer.members(pool.id)) == [
        "10.1.0.1",
        "10.1.0.2",
    ]
    client.load_balancer.delete_load_balancer(made.id, cascade=True)
    assert clients.wait_settled(client, made.id) == "DELETED"
    assert [str(call) for call in octavia_proxy.writes] == [
        "POST /v2/lbaas/loadbalancers",
        f"DELETE /v2/lbaas/loadbalancers/{made.id}?cascade=True",
    ]
    assert [call.status for call in octavia_proxy.writes] == [201, 204]


@pytest.mark.soak
def test_a_load_balancer_whose_boot_is_held_is_pending_and_rejects_writes(
    client: Connection, octavia: Octavia
) -> None:
    with octavia.holding("boot"):
        made = client.load_balancer.create_load_balancer(**whole("held"))
        with pytest.raises(ConflictException, match="Invalid state PENDING_CREATE"):
            client.load_balancer.update_load_balancer(made.id, description="changed")
        assert (
            client.load_balancer.get_load_balancer(made.id).provisioning_status == "PENDING_CREATE"
        )
    assert clients.wait_settled(client, made.id) == "ACTIVE"


@pytest.mark.soak
def test_a_failed_boot_leaves_the_load_balancer_in_error(
    client: Connection, octavia: Octavia
) -> None:
    with octavia.failing("boot"):
        made = client.load_balancer.create_load_balancer(**whole("no-machine"))
        assert clients.wait_settled(client, made.id) == "ERROR"
    client.load_balancer.failover_load_balancer(made.id)
    assert clients.wait_settled(client, made.id) == "ACTIVE"


@pytest.mark.soak
def test_a_failed_configuration_leaves_the_listener_in_error(
    client: Connection, octavia: Octavia
) -> None:
    made = client.load_balancer.create_load_balancer(**whole("no-configuration"))
    clients.wait_settled(client, made.id)
    (listener,) = client.load_balancer.listeners(load_balancer_id=made.id)
    with octavia.failing("configure"):
        client.load_balancer.update_listener(listener.id, connection_limit=7)
        assert clients.wait_settled(client, made.id) == "ACTIVE"
    assert client.load_balancer.get_listener(listener.id).provisioning_status == "ERROR"
    client.load_balancer.update_listener(listener.id, connection_limit=7)
    clients.wait_settled(client, made.id)
    assert client.load_balancer.get_listener(listener.id).provisioning_status == "ACTIVE"


@pytest.mark.soak
def test_a_disconnect_after_the_response_does_not_undo_the_write(
    client: Connection, octavia_proxy: FaultProxy
) -> None:
    octavia_proxy.inject_at(1, Disconnect(after=True))
    with pytest.raises(ConnectFailure):
        client.load_balancer.create_load_balancer(**whole("lost"))
    assert [call.status for call in octavia_proxy.writes] == [201]
    (made,) = client.load_balancer.load_balancers(tags=["is=lost"])
    assert clients.wait_settled(client, made.id) == "ACTIVE"


def test_a_disconnect_before_forwarding_prevents_the_write(
    client: Connection, octavia_proxy: FaultProxy
) -> None:
    octavia_proxy.inject_at(1, Disconnect(after=False))
    with pytest.raises(ConnectFailure):
        client.load_balancer.create_load_balancer(**whole("not-forwarded"))
    assert list(client.load_balancer.load_balancers(tags=["is=not-forwarded"])) == []


def test_the_proxy_sends_an_error_response_of_the_test(
    client: Connection, octavia_proxy: FaultProxy
) -> None:
    octavia_proxy.inject_at(1, ErrorResponse(503, "upgrade", {"Retry-After": "1"}))
    with pytest.raises(HttpException, match="upgrade") as refused:
        client.load_balancer.create_load_balancer(**whole("unserved"))
    assert refused.value.status_code == 503


@pytest.fixture
def active(client: Connection) -> str:
    made = client.load_balancer.create_load_balancer(**whole("active"))
    clients.wait_settled(client, made.id)
    return str(made.id)


def test_the_status_of_members_follows_the_heartbeats_of_their_amphora(
    client: Connection, octavia: Octavia, active: str
) -> None:
    (amphora,) = client.load_balancer.amphorae(loadbalancer_id=active)
    (listener,) = client.load_balancer.listeners(load_balancer_id=active)
    (pool,) = client.load_balancer.pools(loadbalancer_id=active)
    first, second = sorted(
        client.load_balancer.members(pool.id), key=lambda member: str(member.address)
    )

    def become(status: MemberStatus, *expected: str) -> None:
        """Report the second member's status as its amphora; wait until the load balancer, the first
        and the second member have the expected statuses."""
        octavia.heartbeat(amphora.id, {(pool.id, listener.id): {first.id: "UP", second.id: status}})
        clients.wait_until(lambda: statuses() == list(expected))

    def statuses() -> list[str]:
        members = [client.load_balancer.get_member(each.id, pool.id) for each in (first, second)]
        return [
            each.operating_status
            for each in (client.load_balancer.get_load_balancer(active), *members)
        ]

    become("UP", "ONLINE", "ONLINE", "ONLINE")
    become("DOWN", "DEGRADED", "ONLINE", "ERROR")
    become("UP", "ONLINE", "ONLINE", "ONLINE")
