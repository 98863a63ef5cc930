"""The driver authenticates at the real Keystone. If Keystone or Octavia rejects it, the error names
the cause and a remedy."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.drivers.octavia.conftest import StoringRecorder
from tests.drivers.octavia.site import Site, service
from tests.openstack import clients
from tests.openstack.fault_proxy import ErrorResponse, FaultProxy
from tests.openstack.keystone import BALANCERS, Keystone

from fairlead.drivers.octavia.cloud import AccessDenied, Cloud
from fairlead.errors import Refused, Unavailable
from fairlead.sections import OctaviaConfig

SECRET = "application_credential_secret"


@pytest.fixture
def tenant(keystone: Keystone, tmp_path: Path, recorder: StoringRecorder) -> Iterator[Site]:
    """Yield a site whose driver has the application credential."""
    client = keystone.connect("member")
    with FaultProxy(keystone.octavia.url, project=str(client.current_project_id)).listen() as proxy:
        site = Site(proxy, tmp_path, recorder)
        site.client = client
        write(site, entry_of(keystone, "member", proxy))
        yield site
        site.cloud.close()
    clients.delete_load_balancers(client, str(client.current_project_id))


def entry_of(keystone: Keystone, cloud: str, proxy: FaultProxy) -> dict[str, Any]:
    entry: dict[str, Any] = yaml.safe_load(keystone.clouds.read_text())["clouds"][cloud]
    return entry | {"load_balancer_endpoint_override": proxy.url}


def write(site: Site, entry: Mapping[str, Any]) -> None:
    Path(site.config.clouds_file).write_text(yaml.safe_dump({"clouds": {"test": entry}}))


@pytest.mark.soak
async def test_an_exceeded_quota_is_reported_and_leaves_no_object(tenant: Site) -> None:
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
            await tenant.run_pass(service())
    assert sorted(tenant.balancer_ids()) == sorted(others)
    clients.wait_settled(tenant.client, others[0])
    tenant.client.load_balancer.delete_load_balancer(others[0])
    clients.wait_settled(tenant.client, others[0])
    assert await tenant.reconcile(service()) == []
    assert len(tenant.balancer_ids()) == BALANCERS


@pytest.mark.soak
async def test_an_expired_token_is_renewed(tenant: Site) -> None:
    await tenant.driver.read(None)
    tenant.proxy.inject_at(1, ErrorResponse(401, "expired"), counts=lambda _: True)
    assert await tenant.reconcile(service()) == []
    assert [call.status for call in tenant.proxy.calls].count(401) == 1


@pytest.mark.soak
async def test_a_wrong_secret_is_reported_and_a_corrected_one_is_used_without_a_restart(
    tenant: Site, keystone: Keystone
) -> None:
    right = entry_of(keystone, "member", tenant.proxy)
    write(tenant, right | {"auth": right["auth"] | {SECRET: "stolen"}})
    for _ in range(2):
        with pytest.raises(
            AccessDenied,
            match=r"of region R: .*requires authentication.*check the credentials in "
            r"clouds.yaml",
        ):
            await tenant.run_pass(service())
    write(tenant, right)
    assert await tenant.reconcile(service()) == []


@pytest.mark.soak
async def test_a_user_with_read_access_is_told_the_missing_role(
    tenant: Site, keystone: Keystone
) -> None:
    write(tenant, entry_of(keystone, "reader", tenant.proxy))
    with pytest.raises(Refused, match=r"Policy does not allow.*load-balancer_member"):
        await tenant.run_pass(service())


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"auth_type": "v3applicationcredential", "auth": {"auth_url": "http://127.0.0.1:1/v3"}},
            "application credential",
        ),
        ({"auth_type": "v9", "auth": {}}, "v9 could not be found"),
        ({"auth": {"username": "fair", "password": "lead", "project_name": "tenant"}}, "auth_url"),
    ],
)
async def test_an_incomplete_clouds_yaml_is_reported(
    tmp_path: Path, entry: Mapping[str, Any], message: str
) -> None:
    file = tmp_path / "clouds.yaml"
    file.write_text(yaml.safe_dump({"clouds": {"test": entry}}))
    cloud = Cloud(OctaviaConfig(cloud="test", clouds_file=str(file)))
    with pytest.raises(
        AccessDenied, match=f"the cloud 'test' cannot be called: .*{message}.*check octavia.cloud"
    ):
        await cloud.get("loadbalancers")
    cloud.close()
