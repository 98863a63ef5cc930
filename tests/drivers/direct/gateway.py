"""A gateway process for the tests: the driver in a network namespace, told what to do line by line.

Run as `gateway.py NAMESPACE PIN_PATH INTERFACE`. Each line on standard input is a LoadBalancer as JSON, which is applied; an
empty line is a plain read. Each answer is one line: what the maps hold then, the counters and drops. The end of the input
closes the driver and leaves everything forwarding; the line `remove` takes everything away first.
"""

import asyncio
import sys
from pathlib import Path

import msgspec

from fairlead.drivers.direct import DirectDriver
from fairlead.lab import namespace
from fairlead.model import LoadBalancer


async def serve(pin_path: Path, interface: str) -> None:
    driver = DirectDriver([interface], pin_path=pin_path, arena_bytes=4 << 20, connections=16384, datagrams=16384)
    await driver.open()
    print("open", flush=True)
    remove = False
    while not remove and (line := await asyncio.to_thread(sys.stdin.readline)):
        remove = line == "remove\n"
        if line.strip() and not remove:
            intent = msgspec.json.decode(line, type=LoadBalancer)
            before = await driver.read(None)
            await driver.apply(driver.diff(driver.render({intent.service: intent}), before))
        actual = await driver.read(None)
        answer = {
            # Without what only a plan can say: it is not in the maps.
            "actual": sorted(
                (str(key), each.uid, [(one.key, one.slots) for one in each.listeners], each.addresses)
                for key, each in actual.items()
            ),
            "counters": sorted((str(key), *each) for key, each in driver.counters().items()),
            "drops": driver.drops(),
        }
        print(msgspec.json.encode(answer).decode(), flush=True)
    await driver.close(remove=remove)


if __name__ == "__main__":
    namespace.enter(sys.argv[1])
    asyncio.run(serve(Path(sys.argv[2]), sys.argv[3]))
