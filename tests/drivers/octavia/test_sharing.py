"""Several Services share one load balancer of a real Octavia. Each has listeners of its own, which
are changed and deleted independently of the others."""

import msgspec
import pytest
from tests.drivers.octavia.conftest import StoringRecorder
from tests.drivers.octavia.site import SUBNET, WEB, Site, listener, member, service, settings
from tests.openstack import clients

from fairlead.drivers.octavia.balancers import BalancerState
from fairlead.drivers.octavia.marks import Owner, shares_with
from fairlead.model import LoadBalancer, ServiceKey, SharedOrAdopted

MAIL = ServiceKey("default", "mail")


def guest(id_: str, *ports: int, uid: str = "uid-mail", **fields: object) -> LoadBalancer:
    octavia = settings(
        shared_or_adopted=SharedOrAdopted(id_), monitor_types=(("TCP", "TCP"),), **fields
    )
    made = service(
        *(listener(port, member(1)) for port in ports or (25,)), octavia=octavia, uid=uid
    )
    return msgspec.structs.replace(made, service=MAIL)


def balancers(site: Site) -> list[str]:
    client = clients.without_auth(octavia=site.proxy.url).load_balancer
    return [each.id for each in client.load_balancers(project_id=site.proxy.project)]


def ports(site: Site, id_: str) -> list[int]:
    client = clients.without_auth(octavia=site.proxy.url).load_balancer
    all_ = client.listeners(project_id=site.proxy.project)
    return sorted(each.protocol_port for each in all_ if each.load_balancers == [{"id": id_}])


async def mail(site: Site) -> BalancerState:
    (tree,) = (await site.found(MAIL)).balancers
    return tree


@pytest.mark.soak
async def test_two_services_share_one_load_balancer(site: Site, recorder: StoringRecorder) -> None:
    web = service(listener(80))
    await site.reconcile(web)
    id_ = (await site.tree()).id
    site.clear_calls()
    await site.reconcile(guest(id_), key=MAIL)
    assert site.writes == [
        "POST pools",
        "PUT pools/_/members",
        "POST healthmonitors",
        "POST listeners",
    ]
    assert ports(site, id_) == [25, 80]
    assert site.planned(guest(id_)).addresses == site.planned(web).addresses
    assert [reason for reason, _ in recorder.events] == [
        "CreatedLoadBalancer",
        "SharingLoadBalancer",
    ]
    # Each Service changes its own parts, and a read of everything finds both as they are.
    site.restart()
    await site.driver.read(None)
    site.clear_calls()
    await site.reconcile(guest(id_), key=MAIL)
    await site.reconcile(web)
    assert site.writes == []
    await site.reconcile(service(listener(80, member(5))))
    assert site.writes == ["PUT pools/_/members"]
    assert (await mail(site)).ownership == "guest"
    # The guest is deleted without effect on the host.
    site.clear_calls()
    await site.reconcile(key=MAIL)
    assert site.writes == ["DELETE listeners/_", "DELETE pools/_"]
    assert ports(site, id_) == [80]
    await site.reconcile()
    assert balancers(site) == []


async def test_the_load_balancer_stays_until_its_last_service_is_deleted(
    site: Site,
) -> None:
    await site.reconcile(service(listener(80)))
    id_ = (await site.tree()).id
    other = msgspec.structs.replace(
        guest(id_, 26, uid="uid-other"), service=ServiceKey("default", "other")
    )
    # Another process adds the guests, so the driver that deletes the host has not read them.
    first = site.driver
    site.restart()
    await site.reconcile(guest(id_), key=MAIL)
    await site.reconcile(other, key=other.service)
    second, site.driver = site.driver, first
    site.clear_calls()
    assert any("have changed" in message for message in await site.reconcile())
    assert site.writes == ["DELETE listeners/_", "DELETE pools/_", "PUT loadbalancers/_"]
    assert ports(site, id_) == [25, 26]
    assert (await site.found()).balancers == ()
    site.driver = second
    await site.reconcile(guest(id_, 25, 27), key=MAIL)
    await site.reconcile(key=MAIL)
    assert ports(site, id_) == [26]
    site.clear_calls()
    await site.reconcile(key=other.service)
    assert site.writes[-1] == "DELETE loadbalancers/_"
    assert balancers(site) == []


OTHER_NAMESPACE = ServiceKey("other", "mail")


def of_other_namespace(id_: str, *ports: int, uid: str = "uid-other-namespace") -> LoadBalancer:
    return msgspec.structs.replace(guest(id_, *ports, uid=uid), service=OTHER_NAMESPACE)


async def test_a_service_of_another_namespace_needs_the_consent_of_the_owner(
    site: Site, recorder: StoringRecorder
) -> None:
    """A Service of another namespace may use the load balancer after the owner has set the tag, and
    keeps its listeners when the tag is removed."""
    client = clients.without_auth(octavia=site.proxy.url)
    await site.reconcile(service(listener(80)))
    id_, tags = (await site.tree()).id, (await site.tree()).tags
    site.clear_calls()
    message = await site.try_pass(of_other_namespace(id_))
    assert f"load balancer {id_} is not shared with namespace other" in message
    assert f"openstack loadbalancer set --tag fairlead.io/shared-with=other {id_}" in message
    assert site.writes == []
    assert (await site.found(OTHER_NAMESPACE)).balancers == ()

    for allowed in (
        "fairlead.io/shared-with=other2",
        "fairlead.io/shared-with=oth",
        "shared-with=other",
        "fairlead.io/shared-with=",
    ):
        client.load_balancer.update_load_balancer(id_, tags=[*tags, allowed])
        clients.wait_settled(client, id_)
        assert "is not shared with" in await site.try_pass(of_other_namespace(id_))
    client.load_balancer.update_load_balancer(id_, tags=[*tags, "fairlead.io/shared-with=other"])
    clients.wait_settled(client, id_)
    await site.reconcile(of_other_namespace(id_), key=OTHER_NAMESPACE)
    assert ports(site, id_) == [25, 80]

    client.load_balancer.update_load_balancer(id_, tags=tags)
    clients.wait_settled(client, id_)
    site.restart()
    await site.reconcile(of_other_namespace(id_, 25, 26), key=OTHER_NAMESPACE)
    assert ports(site, id_) == [25, 26, 80]
    await site.reconcile(key=OTHER_NAMESPACE)
    assert "is not shared with" in await site.try_pass(of_other_namespace(id_))
    assert ports(site, id_) == [80]
    await site.reconcile()


@pytest.mark.soak
async def test_a_recreated_service_needs_the_consent_again(
    site: Site,
) -> None:
    """The listeners of the previous Service of this name are deleted first."""
    client = clients.without_auth(octavia=site.proxy.url)
    made = client.load_balancer.create_load_balancer(
        name="by hand", vip_subnet_id=SUBNET, tags=TAGS
    )
    clients.wait_settled(client, made.id)
    await site.reconcile(guest(made.id), key=MAIL)
    client.load_balancer.update_load_balancer(made.id, tags=["theirs"])
    clients.wait_settled(client, made.id)
    site.restart()
    assert "is not shared with" in await site.try_pass(guest(made.id, uid="uid-other"))
    client.load_balancer.delete_load_balancer(made.id, cascade=True)


@pytest.mark.soak
async def test_a_load_balancer_of_another_cluster_or_without_owner_is_shared_only_with_the_tag(
    site: Site,
) -> None:
    """Without the tag, it is not even shared with a namespace of the same name."""
    client = clients.without_auth(octavia=site.proxy.url)
    other = ["fairlead-cluster=other", "fairlead-service=default/web", "fairlead-uid=uid-web"]
    for tags in (other, [], ["kube_service_kubernetes_default_web"]):
        made = client.load_balancer.create_load_balancer(
            name="theirs", vip_subnet_id=SUBNET, tags=tags
        )
        clients.wait_settled(client, made.id)
        site.clear_calls()
        assert "is not shared with namespace default" in await site.try_pass(guest(made.id))
        assert site.writes == []
        client.load_balancer.delete_load_balancer(made.id, cascade=True)


@pytest.mark.soak
async def test_services_of_the_owners_namespace_may_share_the_load_balancer_after_its_deletion(
    site: Site,
) -> None:
    await site.reconcile(service(listener(80)))
    id_ = (await site.tree()).id
    await site.reconcile(guest(id_), key=MAIL)
    await site.reconcile()
    other = msgspec.structs.replace(
        guest(id_, 26, uid="uid-other"), service=ServiceKey("default", "other")
    )
    await site.reconcile(other, key=other.service)
    assert ports(site, id_) == [25, 26]
    assert "is not shared with namespace other" in await site.try_pass(of_other_namespace(id_))
    await site.reconcile(key=MAIL)
    await site.reconcile(key=other.service)
    assert balancers(site) == []


OWNER = Owner("uid-1", "here")
OCCM = ("kube_service_a_default_mail", "auidmail")
CONSENT = {
    "without tags": ((), (), False),
    "shared with this namespace": (("fairlead.io/shared-with=default",), (), True),
    "shared with another namespace": (("fairlead.io/shared-with=defaults",), (), False),
    "of this cluster and this namespace": (OWNER.tags(WEB, "uid-web"), (), True),
    "of this cluster and another namespace": (
        OWNER.tags(ServiceKey("other", "web"), "uid-web"),
        (),
        False,
    ),
    "of another cluster": (Owner("uid-2", "there").tags(WEB, "uid-web"), (), False),
    "of another cluster, shared with this namespace": (
        (*Owner("uid-2", "there").tags(WEB, "u"), "fairlead.io/shared-with=default"),
        (),
        True,
    ),
    "of OCCM and this namespace": (("kube_service_a_default_web",), OCCM, True),
    "of OCCM and this namespace, without adoption": (
        ("kube_service_a_default_web",),
        (),
        False,
    ),
    "of OCCM and another namespace": (("kube_service_a_other_mail",), OCCM, False),
    "of OCCM and another cluster": (("kube_service_b_default_web",), OCCM, False),
    "of OCCM and a namespace whose name begins with the name of this one": (
        ("kube_service_a_default_ns_web",),
        OCCM,
        False,
    ),
    "of OCCM, adopted by another cluster": (
        (*Owner("uid-2", "there").tags(WEB, "u"), "kube_service_a_default_web"),
        OCCM,
        False,
    ),
}


@pytest.mark.parametrize("name", CONSENT)
def test_which_load_balancers_a_service_may_share(name: str) -> None:
    tags, names, expected = CONSENT[name]
    assert shares_with(OWNER, tags, MAIL, names) is expected


TAGS = ["fairlead.io/shared-with=default", "theirs"]


@pytest.mark.soak
async def test_a_load_balancer_that_a_user_created_stays(site: Site) -> None:
    client = clients.without_auth(octavia=site.proxy.url)
    made = client.load_balancer.create_load_balancer(
        name="by hand", vip_subnet_id=SUBNET, tags=TAGS
    )
    clients.wait_settled(client, made.id)
    client.load_balancer.create_listener(
        loadbalancer_id=made.id, protocol="TCP", protocol_port=443, name="by hand"
    )
    clients.wait_settled(client, made.id)
    await site.reconcile(guest(made.id, 25, 26), key=MAIL)
    # Changes are made in place, as on a load balancer of its own.
    site.clear_calls()
    await site.reconcile(guest(made.id, 25, 26, header="v2"), key=MAIL)
    new = ["POST pools", "PUT pools/_/members", "POST healthmonitors", "PUT listeners/_"]
    assert site.writes == [*new, *new, "DELETE pools/_", "DELETE pools/_"]
    await site.reconcile(guest(made.id, 26), key=MAIL)
    assert ports(site, made.id) == [26, 443]
    # A recreated Service with the same name.
    await site.reconcile(guest(made.id, 26, uid="uid-other"), key=MAIL)
    assert (await mail(site)).uid == "uid-other"
    site.restart()
    await site.driver.read(None)
    await site.reconcile(key=MAIL)
    assert ports(site, made.id) == [443]
    left = client.load_balancer.get_load_balancer(made.id)
    assert (left.name, left.tags) == ("by hand", TAGS)
    client.load_balancer.delete_load_balancer(made.id, cascade=True)


@pytest.mark.soak
async def test_a_port_of_another_service_is_reported_and_nothing_is_created(site: Site) -> None:
    await site.reconcile(service(listener(80)))
    id_ = (await site.tree()).id
    site.clear_calls()
    wanted = guest(id_, 25, 80)
    message = await site.try_pass(wanted)
    assert "port 80/TCP of load balancer" in message
    assert f"is in use by Service {WEB}; give the Service another port" in message
    assert site.writes == []
    # The port becomes free later.
    await site.reconcile()
    assert "does not exist" in await site.try_pass(wanted)


@pytest.mark.soak
async def test_a_service_moves_to_a_shared_load_balancer_and_back(site: Site) -> None:
    """The address changes. The previous objects are deleted when the new ones exist."""
    await site.reconcile(service(listener(80)))
    host = (await site.tree()).id
    own = msgspec.structs.replace(guest(""), settings=settings())
    await site.reconcile(own, key=MAIL)
    site.clear_calls()
    await site.reconcile(guest(host), key=MAIL)
    assert site.writes[-2:] == ["POST listeners", "DELETE loadbalancers/_"]
    assert ports(site, host) == [25, 80]
    await site.reconcile(own, key=MAIL)
    assert ports(site, host) == [80]
    assert len(balancers(site)) == 2
