"""Write the routes of a GoBGP into the kernel, which GoBGP does not do itself.

`python -m fairlead.lab.gobgp DEVICE READY_FILE`, in the network namespace of gobgpd. In: the routes
that gobgpd shows, once per POLL_S. Out: routes of the kernel through DEVICE, to all next hops whose
paths are equally good (ECMP); the ready file exists once gobgpd has answered. Invariant: routes
that this process did not write are not changed. A router that is measured should be BIRD or FRR,
whose routes are in the kernel at once.
"""

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fairlead.net.link import Nexthop, Rtnetlink

POLL_S = 0.5
FAMILIES = ("ipv4", "ipv6")
_AS_PATH, _NEXT_HOP, _MED, _LOCAL_PREFERENCE, _MP_REACH = 2, 3, 4, 5, 14
"""Types of path attributes (RFC 4271, RFC 4760)."""
_DEFAULT_PREFERENCE = 100


class BgpPath(msgspec.Struct):
    """A path to a prefix, as gobgp shows it."""

    attrs: list[dict[str, Any]] = []

    @property
    def rank(self) -> tuple[int, int, int]:
        """The order of preference: a lower rank is better (RFC 4271, section 9.1.2)."""
        preference = self._value(_LOCAL_PREFERENCE, _DEFAULT_PREFERENCE)
        segments = next((each.get("as_paths") for each in self._of(_AS_PATH)), None) or []
        length = sum(segment.get("num", 0) for segment in segments)
        return -preference, length, self._value(_MED, 0)

    @property
    def next_hop(self) -> str:
        found = [each["nexthop"] for kind in (_NEXT_HOP, _MP_REACH) for each in self._of(kind)]
        return str(found[0]) if found else ""

    def _of(self, kind: int) -> list[dict[str, Any]]:
        return [each for each in self.attrs if each.get("type") == kind]

    def _value(self, kind: int, default: int) -> int:
        return next((int(each.get("value", default)) for each in self._of(kind)), default)


def routes_of(shown: str) -> Mapping[str, tuple[str, ...]]:
    """Return the next hops of the best paths to each prefix, sorted."""
    table = msgspec.json.decode(shown or "{}", type=dict[str, list[BgpPath]])
    routes = {}
    for prefix, paths in table.items():
        best = min((path.rank for path in paths), default=None)
        hops = {path.next_hop for path in paths if path.rank == best} - {""}
        if hops:
            routes[prefix] = tuple(sorted(hops))
    return routes


async def follow(device: str, ready: Path) -> None:
    """Keep the routes of the kernel equal to those of gobgpd, until cancelled."""
    written: dict[str, tuple[str, ...]] = {}
    async with Rtnetlink() as links:
        while True:
            if (wanted := await asyncio.to_thread(_shown)) is not None:
                for prefix in written.keys() - wanted.keys():
                    await links.delete_route(prefix)
                for prefix, hops in wanted.items():
                    if written.get(prefix) != hops:
                        await links.set_route(prefix, *(Nexthop(hop, device) for hop in hops))
                written = dict(wanted)
                await asyncio.to_thread(ready.touch)
            await asyncio.sleep(POLL_S)


def _shown() -> Mapping[str, tuple[str, ...]] | None:
    """Return the routes of gobgpd; None while it does not answer."""
    routes: dict[str, tuple[str, ...]] = {}
    for family in FAMILIES:
        done = subprocess.run(
            ["gobgp", "global", "rib", "-a", family, "-j"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return None
        routes |= routes_of(done.stdout)
    return routes


if __name__ == "__main__":
    asyncio.run(follow(sys.argv[1], Path(sys.argv[2])))
