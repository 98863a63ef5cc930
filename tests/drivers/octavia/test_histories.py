"""Whatever a Service requests, and whatever fails meanwhile at a real Octavia, it ends in the
desired state.

The histories are random, each with a number that reproduces it: `--histories 200` runs more of them
than a run of all tests, and `--histories 200 -k "[117]"` runs one."""

import random

from tests.drivers.octavia.cloud_site import CloudSite
from tests.drivers.octavia.histories import Going, history, with_network
from tests.drivers.octavia.site import Site
from tests.drivers.octavia.test_security import guarded, rules
from tests.openstack.octavia import Octavia


async def test_a_history_ends_as_wanted_and_leaves_nothing(
    site: Site, octavia: Octavia, seed: int
) -> None:
    chance = random.Random(seed)
    going = Going(site, octavia, chance)
    for step in history(chance):
        print(step)
        await going.through(step)
    assert site.everything() == []


async def test_so_does_one_with_a_floating_ip_and_a_security_group(
    cloud_site: CloudSite, network_seed: int
) -> None:
    """Faults occur at Neutron, too."""
    site, chance = cloud_site, random.Random(network_seed)
    going = Going(site, site.at.octavia, chance)
    for step in history(chance):
        step = with_network(chance, step, site)
        print(step)
        await going.through(step)
    assert (site.everything(), site.floating, rules(site), guarded(site)) == ([], [], [], set())
    assert list(site.client.network.security_groups(description=site.owner.tag)) == []
