"""The sysctl that limits the kernel's neighbour table: it is reported as too small before nodes no
longer fit, for each address family separately."""

import pytest
from tests.drivers.direct.conftest import NODE1, Run, driver, load_balancer, reconcile

from fairlead.drivers.direct.host_network.requirements import requirements_of
from fairlead.drivers.host import harmful_settings

IPV4, IPV6 = (f"net/{family}/neigh/default/gc_thresh3" for family in ("ipv4", "ipv6"))


@pytest.mark.parametrize(
    ("ipv4", "ipv6", "found"),
    [
        (0, 0, []),
        (1, 1, []),
        (1023, 1023, []),
        (1024, 1023, [(IPV4, "2048")]),
        (1024, 1025, [(IPV4, "2048"), (IPV6, "4096")]),
        (4096, 0, [(IPV4, "8192")]),
    ],
)
def test_a_limit_without_space_for_another_neighbour_is_too_small(
    ipv4: int, ipv6: int, found: list[tuple[str, str]]
) -> None:
    next_hops = [f"10.0.{n >> 8}.{n & 255}" for n in range(ipv4)] + [
        f"fd00::{n:x}" for n in range(ipv6)
    ]
    limits = {IPV4: "1024", IPV6: "1024"}
    assert [
        (each.requirement.setting, each.requirement.recommended)
        for each in harmful_settings(requirements_of(next_hops), limits.get)
    ] == found
    enough = dict(found)
    assert harmful_settings(requirements_of(next_hops), (limits | enough).get) == ()


@pytest.mark.root
def test_a_gateway_requires_space_for_its_next_hops(run: Run) -> None:
    async def scenario() -> None:
        made = driver()
        await made.open()
        assert await made.requirements() == ()
        await reconcile(made, load_balancer(NODE1))
        (requirement,) = await made.requirements()
        assert (requirement.setting, requirement.harmful("1"), requirement.harmful("2")) == (
            IPV4,
            True,
            False,
        )
        await made.close(remove=True)

    run(scenario)
