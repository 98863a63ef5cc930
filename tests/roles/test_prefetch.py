"""At the start, a gateway probes nodes and computes tables for one slice of its Services after the
other, before the loops begin."""

import asyncio
from collections.abc import Collection, Mapping

from tests.drivers.test_monitor import API, DEADLINE_S, WEB, HealthPort, VerdictLog, balancer
from tests.drivers.test_prober import running

from fairlead.errors import Refused
from fairlead.kube.objects import ObjectKey, Service, ServiceMeta
from fairlead.model import LoadBalancer, ServiceKey
from fairlead.roles.prefetch import StartupPrefetch
from fairlead.state import State

OTHER = ServiceKey("default", "refused")


async def test_planned_services_are_probed_and_precomputed_slice_by_slice() -> None:
    log, foreseen, state = VerdictLog(), list[ServiceKey](), State(("services",))
    async with (
        HealthPort(1).listen() as health,
        running(log) as (prober, _),
        asyncio.timeout(DEADLINE_S),
    ):
        known: dict[ServiceKey, LoadBalancer | Refused] = {
            key: balancer(key, health.port, address)
            for key, address in ((WEB, "127.0.0.1"), (API, "127.0.0.2"))
        }
        known[OTHER] = Refused("no", fix="none")

        def plan(keys: Collection[ServiceKey]) -> Mapping[ServiceKey, LoadBalancer | Refused]:
            return {key: known[key] for key in keys}

        ahead = StartupPrefetch(plan, prober, foreseen.extend)
        going_on = asyncio.create_task(ahead.run(state))
        state.update_services(
            {ObjectKey(*key): Service(ServiceMeta(key.name, key.namespace)) for key in known}
        )
        state.mark_synced("services")

        assert ahead.plan([WEB, OTHER]) == {WEB: known[WEB], OTHER: known[OTHER]}
        await log.wait("127.0.0.1", health.port, "up")
        first_s = ahead.last_first_probe_s
        assert not going_on.done(), "one Service has not been planned yet"
        ahead.plan([API])
        await going_on
        assert ahead.last_first_probe_s > first_s, "the second Service has another node"
        assert foreseen == [WEB, API]
        assert (await prober.read(None)).keys() == {WEB, API}

        ahead.plan([WEB])
        await asyncio.sleep(0)
        assert foreseen == [WEB, API], "no Service is planned after the start"


async def test_without_services_the_prefetch_ends_at_once() -> None:
    state = State(("services",))
    state.mark_synced("services")
    async with running(VerdictLog()) as (prober, _), asyncio.timeout(DEADLINE_S):
        await StartupPrefetch(lambda _: {}, prober, lambda _: None).run(state)
        await prober.settled()
