"""The real Octavia admits the users of the real Keystone, with the rights of their roles."""

import pytest
from keystoneauth1.exceptions import Unauthorized
from openstack.connection import Connection
from openstack.exceptions import ForbiddenException
from tests.openstack import clients
from tests.openstack.keystone import BALANCERS, Keystone

NETWORK = "0f1a7c1e-0000-4000-8000-000000000002"


@pytest.fixture
def member(keystone: Keystone) -> Connection:
    return keystone.connect("member")


@pytest.mark.soak
def test_an_application_credential_may_create_load_balancers_up_to_the_quota(
    member: Connection, keystone: Keystone
) -> None:
    made = [
        member.load_balancer.create_load_balancer(name=f"lb{n}", vip_network_id=NETWORK)
        for n in range(BALANCERS)
    ]
    assert {each.project_id for each in made} == {member.current_project_id}
    with pytest.raises(ForbiddenException, match="Quota has been met"):
        member.load_balancer.create_load_balancer(name="one-more", vip_network_id=NETWORK)
    assert len(list(keystone.connect("reader").load_balancer.load_balancers())) == BALANCERS
    clients.delete_load_balancers(member, str(member.current_project_id))
    assert list(member.load_balancer.load_balancers()) == []


@pytest.mark.soak
def test_a_user_with_read_access_may_not_create_load_balancers(keystone: Keystone) -> None:
    with pytest.raises(ForbiddenException, match="Policy does not allow"):
        keystone.connect("reader").load_balancer.create_load_balancer(
            name="readers", vip_network_id=NETWORK
        )


@pytest.mark.soak
def test_a_wrong_secret_is_rejected(keystone: Keystone) -> None:
    with pytest.raises(Unauthorized):
        keystone.connect("member", application_credential_secret="stolen").session.get_token()
