"""A provider that does not support HTTP monitors does not exhaust the quota.

In some clusters the load balancer counted as broken, another one was created, and then the next,
until the project's quota was used up. Here a Service is planned for the real provider `ovn` as if
it supported HTTP monitors."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.drivers.octavia.conftest import Heard
from tests.drivers.octavia.site import Site, listener, service, settings
from tests.openstack.cloud import Cloud
from tests.openstack.fixtures import Fronts

from fairlead.errors import Refused
from fairlead.model import LoadBalancer, OctaviaMonitorType, OctaviaPlace


@pytest.fixture
def ovn(fronts: Fronts, tmp_path: Path, heard: Heard) -> Iterator[Site]:
    site = Site(fronts.octavia, tmp_path, heard)
    yield site
    site.cloud.close()


def web(cloud: Cloud, monitor_type: OctaviaMonitorType, *, port: int = 80) -> LoadBalancer:
    place = OctaviaPlace(cloud.subnet)
    octavia = settings(
        provider="ovn", method="SOURCE_IP_PORT", place=place, monitor_types=(("TCP", monitor_type),)
    )
    return service(listener(port), octavia=octavia)


def ports(cloud: Cloud, site: Site) -> int:
    """Return the ports of load balancers of provider ovn that count against the project's quota."""
    found = cloud.client().network.ports(project_id=site.front.project)
    return sum(each.device_owner == "ovn-lb:vip" for each in found)


async def test_a_monitor_that_is_refused_eats_no_quota(ovn: Site, cloud: Cloud) -> None:
    for _ in range(4):
        with pytest.raises(Refused, match="does not support"):
            await ovn.once(web(cloud, "HTTP"))
        await ovn.driver.read(None)
    assert ovn.everything() == []
    assert ovn.writes == ["POST loadbalancers"]
    left = ports(cloud, ovn)
    assert left == 1  # which the provider has forgotten
    await ovn.bring(web(cloud, "TCP"))
    tree = await ovn.tree()
    for _ in range(4):
        with pytest.raises(Refused, match="does not support"):
            await ovn.once(web(cloud, "HTTP"))
        await ovn.driver.read(None)
    after = await ovn.tree()
    assert (after.id, after.address, ovn.everything()) == (tree.id, tree.address, [tree.id])
    await ovn.bring()
    assert ovn.everything() == []
    assert ports(cloud, ovn) == left
