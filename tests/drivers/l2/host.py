"""An announcing host of a test: the driver in the namespace of its process.

In: a JSON object with the arguments of the driver as the only argument, and one JSON object per
line on standard input: `announce` (addresses by Service; the previous ones are withdrawn), `leave`,
`stay`, `withdraw`, `audit` (the addresses about which nothing is decided; null: all), `state`,
`outcomes`, `clock`, `remove`, `close`. Out: one JSON object per line as the
answer."""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from fairlead.announce_sections import L2Config
from fairlead.drivers.l2 import L2Driver
from fairlead.errors import FairleadError
from fairlead.model import Announcement, NodeService, Outcome, ServiceKey
from fairlead.roles.l2_process import command
from fairlead.telemetry import configure_logging


class Host:
    """The driver, and the part of a loop that repeats Services."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.cluster = arguments.get("cluster", "cluster")
        self.driver = L2Driver(
            arguments.get("role", "gateway"),
            arguments["name"],
            msgspec.convert(arguments.get("section", {}), L2Config),
            command(),
            cluster=lambda: self.cluster,
            pin_path=Path(arguments["pin_path"]),
            selectors=arguments.get("selectors", ("eth0",)),
            requeue=self.requeue,
            undecided=lambda: self.undecided,
        )
        self.undecided: Sequence[str] | None = None
        self.intents: dict[ServiceKey, NodeService] = {}
        self.outcomes: dict[str, Any] = {}
        self.notes: list[str] = []
        self.dirty: set[ServiceKey] = set()
        self.wake = asyncio.Event()

    def requeue(self, keys: Any) -> None:
        self.dirty |= set(keys)
        self.wake.set()

    async def reconcile(self, keys: set[ServiceKey]) -> None:
        actual = await self.driver.read(keys)
        desired = self.driver.render({key: self.intents[key] for key in keys & self.intents.keys()})
        changes = self.driver.diff(desired, actual)
        outcomes = await self.driver.apply(changes) if changes else {}
        for key in keys:
            outcome = outcomes.get(key, Outcome("done"))
            self.outcomes[str(key)] = msgspec.to_builtins(outcome)
            self.notes += [str(note) for note in outcome.notes]

    async def loop(self) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            keys, self.dirty = self.dirty, set()
            await self.reconcile(keys)

    async def answer(self, request: Mapping[str, Any]) -> Any:
        match request:
            case {"announce": services, **rest}:
                before = set(self.intents)
                self.intents = {
                    ServiceKey.parse(key): intent(ServiceKey.parse(key), addresses, rest)
                    for key, addresses in services.items()
                }
                await self.reconcile(before | self.intents.keys())
                return self.outcomes
            case {"leave": _}:
                await self.driver.leave()
            case {"stay": _}:
                await self.driver.stay()
            case {"state": _}:
                return msgspec.to_builtins(self.driver.status())
            case {"outcomes": _}:
                return {"outcomes": self.outcomes, "notes": self.notes}
            case {"withdraw": _}:
                await self.driver.withdraw()
            case {"audit": undecided}:
                self.undecided = undecided
                return sorted(map(str, await self.driver.read(None)))
            case {"cluster": cluster}:
                self.cluster = cluster
            case {"clock": _}:
                return datetime.now(UTC).isoformat()
            case {"remove": _}:
                return list(await self.driver.remove())
        return {}


def intent(key: ServiceKey, addresses: Sequence[str], fields: Mapping[str, Any]) -> NodeService:
    announcement = Announcement(
        tuple(addresses),
        "l2",
        leaving=fields.get("leaving", False),
        candidates=tuple(fields["candidates"]) if "candidates" in fields else None,
        interfaces=tuple(fields.get("interfaces", ())),
    )
    return NodeService(key, "uid", "Cluster", "Local", (), announcements=(announcement,))


async def main() -> None:
    configure_logging()
    host = Host(json.loads(sys.argv[1]))
    try:
        await host.driver.open()
    except FairleadError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    running = asyncio.create_task(host.driver.run())
    looping = asyncio.create_task(host.loop())
    await host.driver.read(None)
    print(json.dumps({"pid": os.getpid()}), flush=True)
    while line := await reader.readline():
        request = json.loads(line)
        print(json.dumps(await host.answer(request)), flush=True)
    looping.cancel()
    running.cancel()
    await asyncio.wait([running, looping])
    await host.driver.close()


if __name__ == "__main__":
    asyncio.run(main())
