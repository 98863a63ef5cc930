"""Connect to the target ports of pods from this host.

In: facts with pods. Out: for each target, whether the connection was accepted, refused, or not
answered. Nothing is sent over a connection."""

import asyncio
from contextlib import suppress

from fairlead.doctor.facts import Answer, Facts, Target, cases
from fairlead.doctor.rules.traffic import ready_pods, targets

CONNECT_S = 1.0
CONNECTIONS = 64
"""The maximum number of connections at a time."""


async def connect(facts: Facts) -> dict[Target, Answer]:
    """Connect to each TCP target port of the ready pods of the examined Services."""
    wanted = {
        target
        for case in cases(facts)
        for pod in ready_pods(case)
        for port in case.service.spec.ports
        if port.protocol == "TCP"
        for target in targets(case, pod, port.target_port or port.port)
    }
    limit = asyncio.Semaphore(CONNECTIONS)

    async def one(target: Target) -> tuple[Target, Answer]:
        async with limit:
            return target, await _connect(target)

    return dict(await asyncio.gather(*map(one, sorted(wanted))))


async def _connect(target: Target) -> Answer:
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(target.address, target.port)
    except ConnectionRefusedError:
        return "refused"
    except OSError:  # TimeoutError too
        return "silent"
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return "open"
