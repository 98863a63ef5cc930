"""A simulated link with announcing hosts: the engine and the liveness of each host, and frames that
take no time. Partitions, dead hosts and dead processes are sets of names."""

from fairlead.drivers.l2.engine import Engine
from fairlead.drivers.l2.entry import Announce, Cease, Forget, Probe, SetState, Want, Withdraw
from fairlead.drivers.l2.liveness import Liveness
from fairlead.drivers.l2.records import Hello, HostState, Place
from fairlead.drivers.l2.schedule import Schedule

LINK = 1
INTERVAL_S, MULTIPLIER, STALE_S = 0.05, 3, 60.0
STEP_S = 0.01


class SimulatedHost:
    """One host. The kernel's part lives as long as the host, the process's part as long as the
    process."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.mac = bytes([2, 0, 0, 0, 0, number])
        self.alive = True
        self.kernel: dict[Place, bool] = {}
        self.state: HostState = "starting"
        self.confirmed_s = float("-inf")
        self.engine: Engine | None = None
        self.liveness: Liveness | None = None
        self.schedule = Schedule()

    def start(self, now_s: float) -> None:
        """Start the process."""
        self.engine, self.schedule = Engine(self.name), Schedule()
        self.liveness = Liveness(self.name, INTERVAL_S, MULTIPLIER, now_s)
        self.engine.add_link(LINK, self.liveness.settled_s)
        self.state = "ready" if self.state == "ready" else "starting"

    def want(self, wanted: dict[Place, Want], gone: list[Place], now_s: float) -> None:
        assert self.engine is not None
        self.state = "ready" if self.state == "starting" else self.state
        leaving = self.state == "leaving"
        self.engine.set_ready(now_s, ready=True, leaving=leaving)
        owned = [place for place, mine in self.kernel.items() if mine]
        self.engine.want(wanted, gone, now_s, owned=owned)

    def leave(self, now_s: float, leaving: bool) -> None:
        assert self.engine is not None
        self.state = "leaving" if leaving else "ready"
        self.engine.set_ready(now_s, ready=True, leaving=leaving)


class Network:
    """The link. `side`: the part of a partition in which each host is."""

    def __init__(self, names: list[str]) -> None:
        self.now_s = 1000.0
        self.hosts = {name: SimulatedHost(name, i) for i, name in enumerate(names, 1)}
        self.side = dict.fromkeys(names, 0)
        self.lost_withdrawals = 0
        """The number of the next withdrawals that do not arrive."""
        self.strangers: dict[Place, bytes] = {}
        self.moves: list[tuple[Place, str, str]] = []
        """Each time a host began to own an address: the address, the host, the cause."""
        self.announced: list[tuple[str, Place]] = []
        """Each announcement: the host, the address."""

    def reachable(self, one: str, other: str) -> bool:
        return (
            one != other
            and self.hosts[one].alive
            and self.hosts[other].alive
            and self.side[one] == self.side[other]
        )

    def owners(self, place: Place) -> list[str]:
        """Return the hosts that are alive and whose kernel answers for the address."""
        return [
            host.name
            for host in self.hosts.values()
            if host.alive and host.kernel.get(place, False)
        ]

    def run(self, duration_s: float) -> None:
        end_s = self.now_s + duration_s
        while self.now_s < end_s:
            self.now_s += STEP_S
            for host in self.hosts.values():
                if host.alive and host.engine is not None:
                    self._step(host)

    def _step(self, host: SimulatedHost) -> None:
        assert host.engine is not None
        assert host.liveness is not None
        now_s = self.now_s
        host.confirmed_s = now_s
        if host.liveness.verdicts(now_s):
            host.engine.members(LINK, host.liveness.standings, now_s)
        if (requests := host.liveness.requests(now_s)) is not None:
            changed = False
            for other in self.hosts.values():
                asked = requests.everyone or other.mac in requests.macs
                if asked and other.state != "starting" and self.reachable(host.name, other.name):
                    left_ms = int(1000 * max(0.0, other.confirmed_s + STALE_S - now_s))
                    hello = Hello(
                        other.mac, other.name, self._presented(other), left_ms, requests.round
                    )
                    changed |= host.liveness.heard(hello, now_s)
            if changed:
                host.engine.members(LINK, host.liveness.standings, now_s)
        host.engine.tick(now_s)
        self.carry_out(host)

    def _presented(self, host: SimulatedHost) -> HostState:
        cut_off = host.engine is not None and host.engine.was_cut_off(LINK, self.now_s)
        return "returned" if cut_off and host.state == "ready" else host.state

    def carry_out(self, host: SimulatedHost) -> None:
        assert host.engine is not None
        effects, host.engine.effects = host.engine.effects, []
        for effect in effects:
            match effect:
                case SetState(place, owned):
                    if owned and not host.kernel.get(place):
                        self.moves.append((place, host.name, host.engine.entries[place].cause))
                    host.kernel[place] = owned
                case Forget(place):
                    host.kernel.pop(place, None)
                case Announce(place, urgent):
                    host.schedule.start(place, self.now_s, urgent=urgent)
                case Cease(place):
                    host.schedule.stop(place)
                case Probe(place):
                    self._probe(host, place)
                case Withdraw(place):
                    self._withdraw(host, place)
        for place in host.schedule.due(self.now_s):
            self._announce(host, place)

    def _probe(self, host: SimulatedHost, place: Place) -> None:
        assert host.engine is not None
        for other in self.hosts.values():
            if other.kernel.get(place) and self.reachable(host.name, other.name):
                host.engine.claim(place, other.name, other.mac, "announced", self.now_s)
        if place in self.strangers:
            host.engine.claim(place, None, self.strangers[place], "used", self.now_s)

    def _withdraw(self, host: SimulatedHost, place: Place) -> None:
        if self.lost_withdrawals:
            self.lost_withdrawals -= 1
            return
        for other in self.hosts.values():
            if self.reachable(host.name, other.name) and other.engine is not None:
                other.engine.withdrawn(place, host.name, self.now_s)

    def _announce(self, host: SimulatedHost, place: Place) -> None:
        self.announced.append((host.name, place))
        for other in self.hosts.values():
            if not self.reachable(host.name, other.name) or place not in other.kernel:
                continue
            stale = self.now_s > other.confirmed_s + STALE_S
            yields = stale and other.kernel[place]
            if yields:
                other.kernel[place] = False
            if other.engine is not None:
                if yields:
                    other.engine.yielded(place, self.now_s)
                other.engine.claim(place, host.name, host.mac, "announced", self.now_s)
