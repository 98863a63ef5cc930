"""A driver in a process of its own, which a test can kill: `python -m tests.drivers.bgp.process
FOLDER ADDRESS...` announces the addresses to the router, and prints a line when they are done."""

import asyncio
import sys
from pathlib import Path

from tests.drivers.bgp.site import WEB, announced, intent, peer, running


async def main(folder: str, *addresses: str) -> None:
    async with running(Path(folder), [peer()]) as driver:
        await announced(driver, {WEB: intent(*addresses)})
        print("announced", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
