"""Which addresses other stations use as well, and which of them to defend.

In: the claims that the kernel has seen, the addresses of this gateway, the time. Out: conflicts,
and addresses to announce once more. Follows RFC 5227, 2.4 (c): an address that must not be given up
is defended by one announcement in `DEFEND_S`, so that two stations that both defend it cause little
traffic."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from fairlead.drivers.announce.maps import Claim

SETTLE_S = 10.0
"""In the first moments of an address, claims of its former owner are no conflict. Gateways, which
agree about an address by announcing it, are in conflict only if they go on for longer."""
CLAIM_S = 600.0
"""How long a claim of another station is reported."""
DEFEND_S = 10.0
"""DEFEND_INTERVAL of RFC 5227."""


class Conflicts:
    """The conflicts about the addresses of one gateway."""

    def __init__(self) -> None:
        self._since_s: dict[tuple[str, str], float] = {}
        """When each station began to use each address."""
        self._defended_s: dict[str, float] = {}

    def look(
        self,
        claims: Iterable[Claim],
        owned_since_s: Mapping[str, float],
        gateways: Collection[str],
        now_s: float,
    ) -> Sequence[Claim]:
        """Return the claims that are conflicts. `claims`: the last one of each address.
        `owned_since_s`: when this gateway began to announce each of its addresses. `gateways`: the
        MAC addresses of gateways."""
        recent = [
            each
            for each in sorted(claims)
            if each.age_s <= CLAIM_S and each.address in owned_since_s
        ]
        before = self._since_s
        self._since_s = {
            (each.address, each.mac): before.get((each.address, each.mac), now_s - each.age_s)
            for each in recent
        }
        found = []
        for each in recent:
            came_s = now_s - each.age_s
            lasts_s = came_s - self._since_s[each.address, each.mac]
            agreed = each.mac in gateways and lasts_s <= SETTLE_S
            if came_s >= owned_since_s[each.address] + SETTLE_S and not agreed:
                found.append(each)
        return found

    def defend(self, conflicts: Iterable[Claim], now_s: float) -> Sequence[str]:
        """Return the addresses to announce once: those claimed since they were defended last."""
        found = []
        for each in conflicts:
            last_s = self._defended_s.get(each.address, float("-inf"))
            if now_s - each.age_s > last_s and now_s - last_s >= DEFEND_S:
                self._defended_s[each.address] = now_s
                found.append(each.address)
        return found
