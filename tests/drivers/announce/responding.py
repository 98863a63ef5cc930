"""A process that answers for addresses: `python responding.py NAMESPACE PIN_PATH ADDRESS...`.

It owns the addresses on eth0, prints a line when they are set, and goes on until it is killed."""

import asyncio
import sys
from pathlib import Path

from fairlead.drivers.announce.responder import Responder
from fairlead.lab import namespace


async def main(name: str, pin_path: str, *addresses: str) -> None:
    namespace.enter(name)
    responder = Responder(lambda: ("eth0",), Path(pin_path), 60.0)
    await responder.open()
    await responder.set(dict.fromkeys(addresses, "eth0"), ())
    print("set", flush=True)
    await responder.run()


asyncio.run(main(*sys.argv[1:]))
