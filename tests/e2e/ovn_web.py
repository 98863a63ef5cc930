"""A Service of class ovn in a lab with OVN, and what its pods and OVN show of it."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from tests.drivers.ovn.traffic import Answer, call, calls
from tests.e2e.load import CLIENT, Web, until

from fairlead.lab.objects import PODS
from fairlead.lab.ovn import edge
from fairlead.lab.ovn.view import BalancerView, view

CALLS = 400


class OvnWeb(Web):
    """A Service of class ovn and its pods. A change counts as done when every chassis has it."""

    gateways = ()

    async def await_weights(self, nodes: Collection[str]) -> None:
        """Wait until all backends in OVN are the ready pods."""

        async def as_wanted() -> bool:
            return await self.backends() == await self.pod_addresses()

        await until(as_wanted, "the backends in OVN")
        await edge.central(self.site.topology).synchronize()

    async def backends(self) -> set[str]:
        """Return the addresses and ports that get new connections."""
        return {each for row in await self.rows() for each in row.backends}

    async def rows(self) -> Sequence[BalancerView]:
        """Return what OVN serves: the rows without those of draining backends."""
        found = (await view(self.site.topology)).balancers
        return [row for row in found if not row.draining]

    async def pod_addresses(self) -> set[str]:
        """Return the addresses and ports of the pods that are not terminating."""
        async with self.site.client() as client:
            pods = await client.list(PODS)
        texts = {
            each.ip
            for pod in pods
            if not pod.metadata.deletion_timestamp
            for each in pod.status.pod_ips
        }
        return {f"[{text}]:8080" if ":" in text else f"{text}:8080" for text in texts}

    def own(self, address: str) -> str:
        """Return the client's address of the same family."""
        return self.site.topology.host(CLIENT).addresses[":" in address]

    async def calls(self, address: str, count: int = CALLS) -> Counter[str]:
        """Return how often each pod answered. Every pod must have seen the client's address."""
        pods, peers = await calls(self.site.namespace(CLIENT), address, count)
        assert peers == {self.own(address)}
        return pods

    async def call(self, address: str) -> Answer:
        return await call(self.site.namespace(CLIENT), address)


def check_shares(pods: Mapping[str, int], names: Collection[str]) -> None:
    """Check that the connections of each pod are within four standard deviations of its share."""
    share = 1 / len(names)
    deviation = math.sqrt(CALLS * share * (1 - share))
    assert pods.keys() == set(names)
    assert all(abs(each - CALLS * share) < 4 * deviation for each in pods.values()), pods
