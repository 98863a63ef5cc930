"""Several Services on one load balancer of a real Octavia: each has its own listeners, which are
deleted independently."""

import msgspec
import pytest
from tests.drivers.octavia.conftest import Heard
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
    client = clients.without_auth(octavia=site.front.url).load_balancer
    return [each.id for each in client.load_balancers(project_id=site.front.project)]


def ports(site: Site, id_: str) -> list[int]:
    client = clients.without_auth(octavia=site.front.url).load_balancer
    all_ = client.listeners(project_id=site.front.project)
    return sorted(each.protocol_port for each in all_ if each.load_balancers == [{"id": id_}])


async def mail(site: Site) -> BalancerState:
    (tree,) = (await site.found(MAIL)).balancers
    return tree


async def test_two_services_on_one(site: Site, heard: Heard) -> None:
    web = service(listener(80))
    await site.bring(web)
    id_ = (await site.tree()).id
    site.forget()
    await site.bring(guest(id_), key=MAIL)
    assert site.writes == [
        "POST pools",
        "PUT pools/_/members",
        "POST healthmonitors",
        "POST listeners",
    ]
    assert ports(site, id_) == [25, 80]
    assert site.planned(guest(id_)).addresses == site.planned(web).addresses
    assert [reason for reason, _ in heard.events] == ["CreatedLoadBalancer", "SharingLoadBalancer"]
    # Each Service changes its own parts, and a read of everything finds both as they are.
    site.anew()
    await site.driver.read(None)
    site.forget()
    await site.bring(guest(id_), key=MAIL)
    await site.bring(web)
    assert site.writes == []
    await site.bring(service(listener(80, member(5))))
    assert site.writes == ["PUT pools/_/members"]
    assert (await mail(site)).ownership == "guest"
    # The guest is deleted without effect on the host.
    site.forget()
    await site.bring(key=MAIL)
    assert site.writes == ["DELETE listeners/_", "DELETE pools/_"]
    assert ports(site, id_) == [80]
    await site.bring()
    assert balancers(site) == []


async def test_the_host_goes_first_and_the_last_one_takes_it_away(site: Site) -> None:
    await site.bring(service(listener(80)))
    id_ = (await site.tree()).id
    other = msgspec.structs.replace(
        guest(id_, 26, uid="uid-other"), service=ServiceKey("default", "other")
    )
    # Another process has added them: the driver that deletes has not seen them.
    first = site.driver
    site.anew()
    await site.bring(guest(id_), key=MAIL)
    await site.bring(other, key=other.service)
    second, site.driver = site.driver, first
    site.forget()
    assert any("have changed" in told for told in await site.bring())
    assert site.writes == ["DELETE listeners/_", "DELETE pools/_", "PUT loadbalancers/_"]
    assert ports(site, id_) == [25, 26]
    assert (await site.found()).balancers == ()
    site.driver = second
    await site.bring(guest(id_, 25, 27), key=MAIL)
    await site.bring(key=MAIL)
    assert ports(site, id_) == [26]
    site.forget()
    await site.bring(key=other.service)
    assert site.writes[-1] == "DELETE loadbalancers/_"
    assert balancers(site) == []


STRANGER = ServiceKey("other", "mail")


def stranger(id_: str, *ports: int, uid: str = "uid-stranger") -> LoadBalancer:
    return msgspec.structs.replace(guest(id_, *ports, uid=uid), service=STRANGER)


async def test_without_consent_nothing_is_made_on_it(site: Site, heard: Heard) -> None:
    """Another namespace may use the load balancer after the owner has set the tag, and keeps it
    when the tag is removed."""
    client = clients.without_auth(octavia=site.front.url)
    await site.bring(service(listener(80)))
    id_, tags = (await site.tree()).id, (await site.tree()).tags
    site.forget()
    told = await site.tried(stranger(id_))
    assert f"load balancer {id_} is not shared with namespace other" in told
    assert f"openstack loadbalancer set --tag fairlead.io/shared-with=other {id_}" in told
    assert site.writes == []
    assert (await site.found(STRANGER)).balancers == ()

    for allowed in (
        "fairlead.io/shared-with=other2",
        "fairlead.io/shared-with=oth",
        "shared-with=other",
        "fairlead.io/shared-with=",
    ):
        client.load_balancer.update_load_balancer(id_, tags=[*tags, allowed])
        clients.settled(client, id_)
        assert "is not shared with" in await site.tried(stranger(id_))
    client.load_balancer.update_load_balancer(id_, tags=[*tags, "fairlead.io/shared-with=other"])
    clients.settled(client, id_)
    await site.bring(stranger(id_), key=STRANGER)
    assert ports(site, id_) == [25, 80]

    client.load_balancer.update_load_balancer(id_, tags=tags)
    clients.settled(client, id_)
    site.anew()
    await site.bring(stranger(id_, 25, 26), key=STRANGER)
    assert ports(site, id_) == [25, 26, 80]
    await site.bring(key=STRANGER)
    assert "is not shared with" in await site.tried(stranger(id_))
    assert ports(site, id_) == [80]
    await site.bring()


async def test_a_service_of_the_same_name_that_was_made_again_needs_consent_as_any_other(
    site: Site,
) -> None:
    """The listeners of the former Service of this name are removed first."""
    client = clients.without_auth(octavia=site.front.url)
    made = client.load_balancer.create_load_balancer(
        name="by hand", vip_subnet_id=SUBNET, tags=TAGS
    )
    clients.settled(client, made.id)
    await site.bring(guest(made.id), key=MAIL)
    client.load_balancer.update_load_balancer(made.id, tags=["theirs"])
    clients.settled(client, made.id)
    site.anew()
    assert "is not shared with" in await site.tried(guest(made.id, uid="uid-again"))
    client.load_balancer.delete_load_balancer(made.id, cascade=True)


async def test_one_of_another_cluster_or_of_nobody_needs_the_tag(site: Site) -> None:
    """Load balancers of other owners are not shared, even with the namespace of the same name."""
    client = clients.without_auth(octavia=site.front.url)
    other = ["fairlead-cluster=other", "fairlead-service=default/web", "fairlead-uid=uid-web"]
    for tags in (other, [], ["kube_service_kubernetes_default_web"]):
        made = client.load_balancer.create_load_balancer(
            name="theirs", vip_subnet_id=SUBNET, tags=tags
        )
        clients.settled(client, made.id)
        site.forget()
        assert "is not shared with namespace default" in await site.tried(guest(made.id))
        assert site.writes == []
        client.load_balancer.delete_load_balancer(made.id, cascade=True)


async def test_the_namespace_of_an_owner_that_is_gone_still_shares_it(site: Site) -> None:
    await site.bring(service(listener(80)))
    id_ = (await site.tree()).id
    await site.bring(guest(id_), key=MAIL)
    await site.bring()
    again = msgspec.structs.replace(
        guest(id_, 26, uid="uid-other"), service=ServiceKey("default", "other")
    )
    await site.bring(again, key=again.service)
    assert ports(site, id_) == [25, 26]
    assert "is not shared with namespace other" in await site.tried(stranger(id_))
    await site.bring(key=MAIL)
    await site.bring(key=again.service)
    assert balancers(site) == []


OURS = Owner("uid-1", "here")
OCCM = ("kube_service_a_default_mail", "auidmail")
CONSENT = {
    "nobody's": ((), (), False),
    "for this namespace": (("fairlead.io/shared-with=default",), (), True),
    "for another namespace": (("fairlead.io/shared-with=defaults",), (), False),
    "ours, of this namespace": (OURS.tags(WEB, "uid-web"), (), True),
    "ours, of another namespace": (OURS.tags(ServiceKey("other", "web"), "uid-web"), (), False),
    "of another cluster": (Owner("uid-2", "there").tags(WEB, "uid-web"), (), False),
    "of another cluster, for this namespace": (
        (*Owner("uid-2", "there").tags(WEB, "u"), "fairlead.io/shared-with=default"),
        (),
        True,
    ),
    "OCCM's, of this namespace": (("kube_service_a_default_web",), OCCM, True),
    "OCCM's, of this namespace, and it is not taken over from": (
        ("kube_service_a_default_web",),
        (),
        False,
    ),
    "OCCM's, of another namespace": (("kube_service_a_other_mail",), OCCM, False),
    "OCCM's, of another cluster": (("kube_service_b_default_web",), OCCM, False),
    "OCCM's, of a cluster whose name begins like that": (
        ("kube_service_a_default_ns_web",),
        OCCM,
        False,
    ),
    "OCCM's once, of another cluster now": (
        (*Owner("uid-2", "there").tags(WEB, "u"), "kube_service_a_default_web"),
        OCCM,
        False,
    ),
}


@pytest.mark.parametrize("name", CONSENT)
def test_who_may_share(name: str) -> None:
    tags, names, expected = CONSENT[name]
    assert shares_with(OURS, tags, MAIL, names) is expected


TAGS = ["fairlead.io/shared-with=default", "theirs"]


async def test_one_that_a_user_has_made_stays(site: Site) -> None:
    client = clients.without_auth(octavia=site.front.url)
    made = client.load_balancer.create_load_balancer(
        name="by hand", vip_subnet_id=SUBNET, tags=TAGS
    )
    clients.settled(client, made.id)
    client.load_balancer.create_listener(
        loadbalancer_id=made.id, protocol="TCP", protocol_port=443, name="by hand"
    )
    clients.settled(client, made.id)
    await site.bring(guest(made.id, 25, 26), key=MAIL)
    # Changes are made in place, as on a load balancer of its own.
    site.forget()
    await site.bring(guest(made.id, 25, 26, header="v2"), key=MAIL)
    new = ["POST pools", "PUT pools/_/members", "POST healthmonitors", "PUT listeners/_"]
    assert site.writes == [*new, *new, "DELETE pools/_", "DELETE pools/_"]
    await site.bring(guest(made.id, 26), key=MAIL)
    assert ports(site, made.id) == [26, 443]
    # A recreated Service with the same name.
    await site.bring(guest(made.id, 26, uid="uid-again"), key=MAIL)
    assert (await mail(site)).uid == "uid-again"
    site.anew()
    await site.driver.read(None)
    await site.bring(key=MAIL)
    assert ports(site, made.id) == [443]
    left = client.load_balancer.get_load_balancer(made.id)
    assert (left.name, left.tags) == ("by hand", TAGS)
    client.load_balancer.delete_load_balancer(made.id, cascade=True)


async def test_a_port_that_is_taken_is_told_and_nothing_is_made(site: Site) -> None:
    await site.bring(service(listener(80)))
    id_ = (await site.tree()).id
    site.forget()
    wanted = guest(id_, 25, 80)
    told = await site.tried(wanted)
    assert "port 80/TCP of load balancer" in told
    assert f"is in use by Service {WEB}; give the Service another port" in told
    assert site.writes == []
    # The port becomes free later.
    await site.bring()
    assert "does not exist" in await site.tried(wanted)


async def test_to_one_of_others_and_back(site: Site) -> None:
    """The address changes; the former parts are deleted when the new ones exist."""
    await site.bring(service(listener(80)))
    host = (await site.tree()).id
    own = msgspec.structs.replace(guest(""), settings=settings())
    await site.bring(own, key=MAIL)
    site.forget()
    await site.bring(guest(host), key=MAIL)
    assert site.writes[-2:] == ["POST listeners", "DELETE loadbalancers/_"]
    assert ports(site, host) == [25, 80]
    await site.bring(own, key=MAIL)
    assert ports(site, host) == [80]
    assert len(balancers(site)) == 2
