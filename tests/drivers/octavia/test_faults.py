"""What goes wrong at a real Octavia, or on the way to it, ends with one load balancer that is as wanted, and nothing else."""

from tests.drivers.octavia.site import WEB, Site, service
from tests.openstack import clients
from tests.openstack.front import Cut, Front

from fairlead.model import LoadBalancer


def everything(front: Front) -> int:
    """How many load balancers the project has, whoever made them."""
    return len(list(clients.without_auth(octavia=front.url).load_balancer.load_balancers(project_id=front.project)))


async def is_whole(site: Site, wanted: LoadBalancer) -> bool:
    found = await site.found()
    desired = site.driver.render({WEB: wanted})
    return site.driver.diff(desired, {WEB: found}) == [] and everything(site.front) == 1


async def test_an_answer_that_is_lost_makes_no_second_one(site: Site) -> None:
    wanted = service()
    site.front.at(1, Cut(after=True))
    told = await site.bring(wanted)
    assert told
    assert "POST loadbalancers" in site.writes
    assert site.writes.count("POST loadbalancers") == 1
    assert await is_whole(site, wanted)
