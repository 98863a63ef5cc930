"""The driver authenticates at the real Keystone, and reports what is wrong if Keystone rejects
it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.drivers.octavia.conftest import Heard
from tests.drivers.octavia.site import Site, service
from tests.openstack import clients
from tests.openstack.front import Answer, Front
from tests.openstack.keystone import BALANCERS, Keystone

from fairlead.drivers.octavia.cloud import AccessDenied, Cloud
from fairlead.errors import Refused, Unavailable
from fairlead.sections import OctaviaConfig

SECRET = "application_credential_secret"


@pytest.fixture
def tenant(keystone: Keystone, tmp_path: Path, heard: Heard) -> Iterator[Site]:
    """A driver with the application credential, which reaches Octavia through a front."""
    client = keystone.connect("member")
    with Front(keystone.octavia.url, project=str(client.current_project_id)).listen() as front:
        site = Site(front, tmp_path, heard)
        site.client = client
        write(site, entry_of(keystone, "member", front))
        yield site
        site.cloud.close()
    clients.clear(client, str(client.current_project_id))


def entry_of(keystone: Keystone, cloud: str, front: Front) -> dict[str, Any]:
    entry: dict[str, Any] = yaml.safe_load(keystone.clouds.read_text())["clouds"][cloud]
    return entry | {"load_balancer_endpoint_override": front.url}


def write(site: Site, entry: Mapping[str, Any]) -> None:
    Path(site.config.clouds_file).write_text(yaml.safe_dump({"clouds": {"test": entry}}))


async def test_a_full_quota_is_told_and_nothing_is_left_of_the_attempts(tenant: Site) -> None:
    network = "0f1a7c1e-0000-4000-8000-000000000002"
    others = [
        tenant.client.load_balancer.create_load_balancer(vip_network_id=network).id
        for _ in range(BALANCERS)
    ]
    for _ in range(3):
        with pytest.raises(
            Unavailable,
            match=r"of region R .*Quota has been met.*raise the project's quota, or delete "
            r"unused objects",
        ):
            await tenant.once(service())
    assert sorted(tenant.everything()) == sorted(others)
    clients.settled(tenant.client, others[0])
    tenant.client.load_balancer.delete_load_balancer(others[0])
    clients.settled(tenant.client, others[0])
    assert await tenant.bring(service()) == []
    assert len(tenant.everything()) == BALANCERS


async def test_a_token_that_has_run_out_is_renewed(tenant: Site) -> None:
    await tenant.driver.read(None)
    tenant.front.at(1, Answer(401, "expired"), counts=lambda _: True)
    assert await tenant.bring(service()) == []
    assert [call.status for call in tenant.front.calls].count(401) == 1


async def test_a_wrong_secret_is_told_and_a_right_one_is_taken_up(
    tenant: Site, keystone: Keystone
) -> None:
    right = entry_of(keystone, "member", tenant.front)
    write(tenant, right | {"auth": right["auth"] | {SECRET: "stolen"}})
    for _ in range(2):
        with pytest.raises(
            AccessDenied,
            match=r"of region R: .*requires authentication.*check the credentials in "
            r"clouds.yaml",
        ):
            await tenant.once(service())
    write(tenant, right)
    assert await tenant.bring(service()) == []


async def test_who_may_only_look_is_told_what_is_missing(tenant: Site, keystone: Keystone) -> None:
    write(tenant, entry_of(keystone, "reader", tenant.front))
    with pytest.raises(Refused, match=r"Policy does not allow.*load-balancer_member"):
        await tenant.once(service())


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (
            {"auth_type": "v3applicationcredential", "auth": {"auth_url": "http://127.0.0.1:1/v3"}},
            "application credential",
        ),
        ({"auth_type": "v9", "auth": {}}, "v9 could not be found"),
        ({"auth": {"username": "fair", "password": "lead", "project_name": "tenant"}}, "auth_url"),
    ],
)
async def test_a_clouds_yaml_that_lacks_something_is_told(
    tmp_path: Path, entry: Mapping[str, Any], said: str
) -> None:
    file = tmp_path / "clouds.yaml"
    file.write_text(yaml.safe_dump({"clouds": {"test": entry}}))
    cloud = Cloud(OctaviaConfig(cloud="test", clouds_file=str(file)))
    with pytest.raises(
        AccessDenied, match=f"the cloud 'test' cannot be called: .*{said}.*check octavia.cloud"
    ):
        await cloud.get("loadbalancers")
    cloud.close()
