"""A gateway process for tests: a driver in a network namespace, controlled through standard input.

Usage: `gateway.py NAMESPACE PIN_PATH OPTIONS`, where OPTIONS is an `Options` as JSON. The process
applies each input line, a LoadBalancer as JSON; an empty line applies nothing. It answers each line
with one line of JSON: interfaces, the content of the maps, counters and drops. At the end of the
input the driver is closed, and the programs keep forwarding. The line `remove` also removes
programs, maps and routes."""

import asyncio
import sys
from pathlib import Path

import msgspec

from fairlead.config import AttachKind
from fairlead.drivers.direct import DirectDriver, Sizes
from fairlead.drivers.direct.maps.pins import OBJECTS
from fairlead.lab import namespace
from fairlead.model import LoadBalancer
from fairlead.telemetry import configure_logging


class Options(msgspec.Struct, frozen=True):
    """Options of the driver. `attach`, `interfaces`: as in the configuration. `objects`: the
    directory of the compiled programs. `size_mib`: see below."""

    attach: AttachKind = "auto"
    objects: str = str(OBJECTS)
    interfaces: tuple[str, ...] = ("eth0",)
    size_mib: int = 4
    """Of the table memory. The tables of flows have 4,096 entries for each MiB."""


async def serve(pin_path: Path, options: Options) -> None:
    driver = DirectDriver(
        options.interfaces,
        attach_kind=options.attach,
        pin_path=pin_path,
        sizes=Sizes(options.size_mib << 20, *(2 * [max(options.size_mib, 1) << 12])),
        object_dir=Path(options.objects),
    )
    await driver.open()
    following = asyncio.create_task(driver.run())
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
            "interfaces": [msgspec.structs.astuple(each) for each in driver.interfaces],
            # Without `spec` and the other fields that are not in the maps.
            "actual": sorted(
                (
                    str(key),
                    each.uid,
                    [(one.key, one.slots) for one in each.listeners],
                    each.addresses,
                )
                for key, each in actual.items()
            ),
            "counters": sorted(
                (str(key), each.packets, each.bytes, each.flows)
                for key, each in driver.counters.services().items()
            ),
            "drops": driver.counters.drops(),
        }
        print(msgspec.json.encode(answer).decode(), flush=True)
    following.cancel()
    await driver.close(remove=remove)


if __name__ == "__main__":
    configure_logging(verbose=False)  # logs go to standard error, answers to standard output
    namespace.enter(sys.argv[1])
    asyncio.run(serve(Path(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=Options)))
