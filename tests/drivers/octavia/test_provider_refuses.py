"""A provider that rejects a health monitor does not exhaust the quota of the project.

In some clusters, a load balancer whose monitor was rejected counted as broken and was replaced
again and again, until the quota was used up. Here the plan contains HTTP monitors for the real
provider `ovn`, which does not support them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.drivers.octavia.conftest import StoringRecorder
from tests.drivers.octavia.site import Site, listener, service, settings
from tests.openstack.cloud import Cloud
from tests.openstack.fixtures import FaultProxies

from fairlead.errors import Refused
from fairlead.model import LoadBalancer, OctaviaMonitorType, OctaviaPlace


@pytest.fixture
def ovn(cloud_proxies: FaultProxies, tmp_path: Path, recorder: StoringRecorder) -> Iterator[Site]:
    site = Site(cloud_proxies.octavia, tmp_path, recorder)
    yield site
    site.cloud.close()


def web(cloud: Cloud, monitor_types: OctaviaMonitorType, *, port: int = 80) -> LoadBalancer:
    place = OctaviaPlace(cloud.subnet)
    octavia = settings(
        provider="ovn",
        method="SOURCE_IP_PORT",
        place=place,
        monitor_types=(("TCP", monitor_types),),
    )
    return service(listener(port), octavia=octavia)


def ports(cloud: Cloud, site: Site) -> int:
    """Return the ports of load balancers of provider ovn that count against the project's quota."""
    found = cloud.client().network.ports(project_id=site.proxy.project)
    return sum(each.device_owner == "ovn-lb:vip" for each in found)


@pytest.mark.soak
async def test_a_rejected_monitor_uses_up_no_quota(ovn: Site, cloud: Cloud) -> None:
    for _ in range(4):
        with pytest.raises(Refused, match="does not support"):
            await ovn.run_pass(web(cloud, "HTTP"))
        await ovn.driver.read(None)
    assert ovn.balancer_ids() == []
    assert ovn.writes == ["POST loadbalancers"]
    left = ports(cloud, ovn)
    assert left == 1  # the provider does not delete the port of the rejected one
    await ovn.reconcile(web(cloud, "TCP"))
    tree = await ovn.tree()
    for _ in range(4):
        with pytest.raises(Refused, match="does not support"):
            await ovn.run_pass(web(cloud, "HTTP"))
        await ovn.driver.read(None)
    after = await ovn.tree()
    assert (after.id, after.address, ovn.balancer_ids()) == (tree.id, tree.address, [tree.id])
    await ovn.reconcile()
    assert ovn.balancer_ids() == []
    assert ports(cloud, ovn) == left
