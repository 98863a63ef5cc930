"""Both providers of the real Octavia, over the real Neutron and OVN."""

import pytest
from openstack.connection import Connection
from openstack.exceptions import HttpException
from tests.openstack import clients
from tests.openstack.cloud import NODES, Cloud
from tests.openstack.fixtures import FaultProxies


@pytest.fixture
def client(cloud_proxies: FaultProxies) -> Connection:
    return clients.without_auth(
        octavia=cloud_proxies.octavia.url, neutron=cloud_proxies.neutron.url
    )


def create(
    client: Connection, cloud: Cloud, provider: str, algorithm: str, **fields: object
) -> tuple[str, str, str]:
    """Create a load balancer for port 80 of all nodes. Return its id, its VIP, and the id of the
    VIP's port."""
    members = [
        {"name": name, "address": address, "protocol_port": 30080}
        for name, address in NODES.items()
    ]
    pool = {"name": "web", "protocol": "TCP", "lb_algorithm": algorithm, "members": members}
    listener = {
        "name": "web",
        "protocol": "TCP",
        "protocol_port": 80,
        "default_pool": pool,
        **fields,
    }
    made = client.load_balancer.create_load_balancer(
        provider=provider, vip_subnet_id=cloud.subnet, listeners=[listener]
    )
    assert clients.wait_settled(client, made.id) == "ACTIVE"
    return str(made.id), str(made.vip_address), str(made.vip_port_id)


def test_ovn_has_a_row_for_the_vip_and_one_for_the_floating_ip(
    client: Connection, cloud: Cloud
) -> None:
    balancer, vip, port = create(client, cloud, "ovn", "SOURCE_IP_PORT")
    floating = client.network.create_ip(floating_network_id=cloud.external_network, port_id=port)
    members = ",".join(f"{address}:30080" for address in NODES.values())
    vips = {f"{vip}:80": members, f"{floating.floating_ip_address}:80": members}

    def rows() -> list[object]:
        return [row["vips"] for row in cloud.ovn.rows("Load_Balancer") if row["name"] == balancer]

    clients.wait_until(lambda: rows() == [vips])
    client.load_balancer.delete_load_balancer(balancer, cascade=True)
    assert clients.wait_settled(client, balancer) == "DELETED"
    assert rows() == []
    assert client.network.get_ip(floating.id).port_id is None
    assert client.network.find_port(port) is None


@pytest.mark.soak
def test_an_amphora_has_a_port_and_a_security_group_that_admits_the_allowed_cidrs(
    client: Connection, cloud: Cloud
) -> None:
    balancer, vip, port = create(
        client, cloud, "amphora", "ROUND_ROBIN", allowed_cidrs=["192.0.2.0/24"]
    )
    assert [each["ip_address"] for each in client.network.get_port(port).fixed_ips] == [vip]
    (group,) = client.network.security_groups(name=f"lb-{balancer}")
    rules = [
        each
        for each in client.network.security_group_rules(security_group_id=group.id)
        if each.port_range_min == 80
    ]
    assert [each.remote_ip_prefix for each in rules] == ["192.0.2.0/24"]
    client.load_balancer.delete_load_balancer(balancer, cascade=True)
    assert clients.wait_settled(client, balancer) == "DELETED"
    assert client.network.find_port(port) is None
    assert list(client.network.security_groups(name=f"lb-{balancer}")) == []


@pytest.mark.soak
def test_provider_ovn_rejects_unsupported_options_with_status_501(
    client: Connection, cloud: Cloud
) -> None:
    with pytest.raises(HttpException, match="allowed_cidrs") as refused:
        create(client, cloud, "ovn", "SOURCE_IP_PORT", allowed_cidrs=["192.0.2.0/24"])
    assert refused.value.status_code == 501


@pytest.mark.soak
def test_objects_that_are_created_through_a_proxy_belong_to_the_project_of_the_test(
    client: Connection, cloud: Cloud, cloud_proxies: FaultProxies
) -> None:
    address = client.network.create_ip(floating_network_id=cloud.external_network)
    assert address.project_id == cloud_proxies.neutron.project
    assert [(call.method, call.status) for call in cloud_proxies.neutron.writes] == [("POST", 201)]
