"""Random changes of a Service and random faults at a real Octavia end in the desired state.

Each history has a number that reproduces it: `--histories 200` runs more histories than a run of
all tests, and `--histories 200 -k "[117]"` runs one; FAIRLEAD_SEED chooses others."""

import os
import random

import pytest
from tests.drivers.octavia.cloud_site import CloudSite
from tests.drivers.octavia.histories import HistoryRunner, history, with_network
from tests.drivers.octavia.site import Site
from tests.drivers.octavia.test_security import nodes_with_group, rules
from tests.openstack.octavia import Octavia

SEED = os.environ.get("FAIRLEAD_SEED") or "0"
pytestmark = pytest.mark.soak


async def test_every_step_of_a_history_ends_in_the_desired_state(
    site: Site, octavia: Octavia, seed: int
) -> None:
    rng = random.Random(f"{SEED} {seed}")
    runner = HistoryRunner(site, octavia, rng)
    for step in history(rng):
        print(step)
        await runner.run_step(step)
    assert site.balancer_ids() == []


async def test_every_step_with_floating_ips_and_security_groups_ends_in_the_desired_state(
    cloud_site: CloudSite, network_seed: int
) -> None:
    """Faults occur at Neutron, too."""
    site, rng = cloud_site, random.Random(f"{SEED} {network_seed}")
    runner = HistoryRunner(site, site.openstack.octavia, rng)
    for step in history(rng):
        step = with_network(rng, step, site)
        print(step)
        await runner.run_step(step)
    assert (site.balancer_ids(), site.floating, rules(site), nodes_with_group(site)) == (
        [],
        [],
        [],
        set(),
    )
    assert list(site.client.network.security_groups(description=site.owner.tag)) == []
