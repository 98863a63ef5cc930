"""The messages between a gateway and the process that watches other gateways. `watch` is the
gateway's side, `roles/neighbor_process` the process."""

import msgspec


class Watch(msgspec.Struct, frozen=True, array_like=True):
    """A station to ask on an interface. `left`: see `plan.heirs.Watched`; the same station is asked
    apart about the addresses that were left to it. It has shown that it has these, because it has
    announced them, so no answer is awaited before those of IPv4 count."""

    interface: str
    mac: str
    left: bool
    addresses: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, bool]:
        return self.interface, self.mac, self.left


class WatchRequest(msgspec.Struct, frozen=True, array_like=True):
    """Watch exactly these stations. `stations`: the MAC addresses of gateways whose announcements
    are reported. `interfaces`: where to listen for them. `trusted`: stations, by interface and MAC
    address, that do not count as lost any more."""

    watches: tuple[Watch, ...]
    stations: tuple[str, ...]
    interfaces: tuple[str, ...]
    trusted: tuple[tuple[str, str], ...] = ()


class Observation(msgspec.Struct, frozen=True, array_like=True):
    """A station has become silent, or answers again. `alone`: this host was the one that was cut
    off."""

    interface: str
    mac: str
    left: bool
    silent: bool
    alone: bool = False

    @property
    def key(self) -> tuple[str, str, bool]:
        return self.interface, self.mac, self.left


class Heard(msgspec.Struct, frozen=True, array_like=True):
    """One of the stations has announced an address."""

    interface: str
    mac: str
    address: str


class WatchReport(msgspec.Struct, frozen=True, array_like=True):
    """What has been observed. `misses`: the questions without an answer since the process
    started. `problem`: why nothing can be observed, for the log of the gateway."""

    observations: tuple[Observation, ...]
    heard: tuple[Heard, ...]
    misses: int
    problem: str = ""
