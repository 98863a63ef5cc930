"""Open flows and new flows at a steady rate, TCP, UDP and QUIC, IPv4 and IPv6, through events of
every type: nothing breaks.

Thousands of flows go through all events by L2 and IPIP; some hundreds, with frequent requests, by
L2 and VXLAN, from XDP. `FAIRLEAD_FLOWS` sets the number by L2 and IPIP; `make histories` runs ten
thousand. Each row is a lab of its own, with another forwarding method and another
hook of the program in the kernel. Each step puts the flows through one event and counts: broken
flows whose pod still exists, 0; failed new flows, 0. When a node is killed, flows that began before
the gateways noticed may be lost. A small machine causes one effect by itself: it delays a node's
answers to probes. Datagrams are then correctly sent to other nodes, so in that step the UDP flows
of this node do not count; connections do. The time until a dead node is noticed is printed and not
limited, because on such a machine it depends on the load."""

import asyncio
import math
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Collection, Sequence
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from tests.drivers.direct.test_upgrade import GROWN_FLOW, MORE_MAPS, build
from tests.e2e.crowd import (
    LATE,
    LATE_OF,
    OPENING_S,
    Crowd,
    Period,
    Shop,
    breaks,
    check_unharmed,
    summary,
    without_moved_flows,
)
from tests.e2e.load import drops, messages, until

import fairlead
from fairlead.kube.objects import ObjectKey
from fairlead.lab import process
from fairlead.lab.objects import NODES
from fairlead.lab.rundir import Transport
from fairlead.lab.server import SERVER_LABEL
from fairlead.lab.site import Site
from fairlead.probe.crowd import SILENCE_S

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A lab: three nodes on a link with its three gateways, two behind a tunnel. The other fields
    are the number of flows of each kind and family, the rate of new ones per second, and the
    interval between the requests of an open flow."""

    name: str
    transport: Transport
    tcp: int
    udp: int
    quic: int
    new_per_s: float
    interval_s: float


FLOWS = int(os.environ.get("FAIRLEAD_FLOWS") or 2_500)
"""The number of open flows by L2 and IPIP."""
IPIP = Row(
    name="l2 and ipip, tc",
    transport=Transport(tunnel="ipip", attach="tc", peers=True),
    tcp=FLOWS * 40 // 100,
    udp=FLOWS * 8 // 100,
    quic=FLOWS * 2 // 100,
    new_per_s=50,
    interval_s=6.0,
)
"""The number of flows matters here, not the rate of requests: long-lived connections are idle most
of the time."""
VXLAN = Row(
    name="l2 and vxlan, xdp",
    transport=Transport(tunnel="vxlan", attach="xdp-generic", peers=True),
    tcp=250,
    udp=50,
    quic=25,
    new_per_s=50,
    interval_s=1.5,
)
CALM_S = 5.0
AFTER, SOON = 1.25, 0.25
"""The number of request intervals after an event in which each open flow has sent another request
and received the answer. SOON is for events that `Stage.until_used` has awaited."""


class Stage(msgspec.Struct):
    """A lab with its Service and its flows. `places`: the nodes of the pods."""

    site: Site
    shop: Shop
    crowd: Crowd
    places: list[str]
    gone: set[str] = msgspec.field(default_factory=set)
    """The names of former pods."""
    down_verdicts: Counter[str] = msgspec.field(default_factory=Counter)
    """The number of `down` verdicts of each node when the last event began."""

    @property
    def gateways(self) -> Sequence[str]:
        return self.shop.gateways

    async def counts_during(
        self, name: str, event: Awaitable[object], *, intervals: float = AFTER
    ) -> Period:
        """Return the counts of the flows during an event that begins when all flows are open, and
        print them for the output of a failed test."""
        await until(self.crowd.all_open, "the opening of all flows", deadline_s=OPENING_S)
        began_s = time.monotonic()
        period = await self.crowd.counts_during(event, intervals=intervals)
        print(f"\n{name}: {time.monotonic() - began_s:.1f} s\n{summary(period)}", flush=True)
        if lines := breaks(self.site, self.gateways, period):
            print(f"{lines}\nThe event began at {began_s:.2f} s.", flush=True)
        for gateway in self.gateways:
            found = {
                reason: number
                for reason, number in (await drops(self.site, gateway)).items()
                if number
            }
            sent = {
                kind: number
                for kind, number in (await messages(self.site, gateway)).items()
                if number
            }
            print(f"{gateway} has dropped so far: {found}; has sent: {sent}", flush=True)
        print(f"`down` verdicts of nodes so far: {dict(+self.shop.down_verdicts())}", flush=True)
        return period

    async def place(self, nodes: Sequence[str], *, replace_all: bool = False) -> None:
        """Place pods on these nodes, one for each time a node is named. `replace_all`: replace all
        pods. First the new pods become ready, then the others are deleted; they are gone when this
        returns."""
        there = await self.shop.pods()
        if replace_all:
            await self.shop.start(nodes)
            await self.shop.end(there)
        self.places = list(nodes)
        await self.shop.place(nodes)

    async def until_used(self, event: Awaitable[object]) -> None:
        """Wait for an event that ends with a placement of pods, and until every open flow has sent
        another request since the gateways knew that placement. Most of this time has passed when
        the former pods have ended."""
        await event
        await asyncio.sleep(self.shop.placed_s + self.shop.interval_s - time.monotonic())

    async def check_unharmed(
        self,
        name: str,
        event: Awaitable[object],
        *,
        unready: Collection[str] = (),
        few: int = 0,
        intervals: float = AFTER,
    ) -> None:
        """Check that no flow broke during the event, except for two sorts. First, UDP flows of pods
        that are gone, were `unready`, or are on nodes with a `down` verdict since the previous
        event began, because some flows send their next request only now. Second, `few` UDP flows of
        which a lost gateway had seen one packet. The next event may begin after this many request
        `intervals`."""
        before, since, self.down_verdicts = (
            set(await self.shop.pods()),
            self.down_verdicts,
            self.shop.down_verdicts(),
        )
        period = await self.counts_during(name, event, intervals=intervals)
        self.gone |= before - set(await self.shop.pods())
        gone = {*self.gone, *unready, *await self.shop.pods_of_down_nodes(since)}
        check_unharmed(without_moved_flows(period, few, gone) if few else period, gone=gone)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    row: Row = request.param
    lab = Site.create(
        f"crowd{os.getpid()}", nodes=3, far_nodes=2, gateways=3, clients=1, transport=row.transport
    )
    async with lab as site:
        shop = Shop(site, interval_s=row.interval_s)
        places = [host.name for host in site.topology.of("node")]
        # The pods are started before the Service is created: all gateways then begin with the same
        # nodes, and no slot is in transition.
        await shop.start(places)
        await shop.create()
        await shop.await_weights(places)
        # A small machine that starts all this at the same time may briefly delay the answers of
        # nodes, for each gateway at another time.
        await asyncio.sleep(CALM_S)
        await shop.await_weights(places)
        async with Crowd(
            shop, tcp=row.tcp, udp=row.udp, quic=row.quic, new_per_s=row.new_per_s
        ) as crowd:
            yield Stage(site, shop, crowd, places)


def rows(*chosen: Row) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "stage", chosen, indirect=True, ids=[row.name for row in chosen], scope="module"
    )


every_row = rows(IPIP, VXLAN)


@every_row
async def test_no_flow_breaks_when_a_gateway_is_lost_and_returns(stage: Stage) -> None:
    """Gateways with the same plan have equal tables: a connection may move from one gateway to
    another without any exchange between them."""

    async def lose_and_find() -> None:
        for gateway in stage.gateways:
            await stage.site.route_vips([each for each in stage.gateways if each != gateway])
            await asyncio.sleep(1)
            await stage.site.route_vips(stage.gateways)
            await asyncio.sleep(1)

    await stage.check_unharmed("a gateway lost and back", lose_and_find())


@every_row
async def test_no_flow_breaks_when_pods_are_scaled_up_and_down(stage: Stage) -> None:
    few, many = stage.places, stage.places * 10
    await stage.check_unharmed("from 5 pods to 50", stage.place(many))
    await stage.check_unharmed(
        "from 50 pods to 5", stage.until_used(stage.place(few)), intervals=SOON
    )


@every_row
async def test_no_flow_of_an_existing_pod_breaks_when_all_pods_are_replaced(stage: Stage) -> None:
    await stage.check_unharmed(
        "rolling update",
        stage.until_used(stage.place(stage.places, replace_all=True)),
        intervals=SOON,
    )


@every_row
async def test_no_flow_of_an_existing_pod_breaks_when_a_node_is_drained_and_uncordoned(
    stage: Stage,
) -> None:
    away, *others = dict.fromkeys(stage.places)
    before = stage.places

    async def set_unschedulable(value: bool) -> None:
        async with stage.site.client() as client:
            await client.patch(NODES, ObjectKey("", away), {"spec": {"unschedulable": value}})

    async def drain() -> None:
        await set_unschedulable(True)
        await stage.place([node if node != away else others[0] for node in before])

    async def take_back() -> None:
        await set_unschedulable(False)
        await stage.place(before)

    await stage.check_unharmed("drain", stage.until_used(drain()), intervals=SOON)
    await stage.check_unharmed("back", stage.until_used(take_back()), intervals=SOON)


@every_row
async def test_no_flow_of_an_existing_pod_breaks_when_a_pod_is_moved(stage: Stage) -> None:
    first, second, *_ = before = stage.places
    for what, node in (("pod moved", second), ("pod moved back", first)):
        moved = stage.until_used(stage.place([node, *before[1:]]))
        await stage.check_unharmed(what, moved, intervals=SOON)


@every_row
async def test_no_flow_breaks_when_weights_change_a_hundred_times(stage: Stage) -> None:
    """Pods become unready and ready again at random; one on each node stays ready, so that no
    weight becomes 0. Connections to an unready pod stay, while nodes send its datagrams to another
    pod."""
    chance = random.Random(77)
    few = stage.places
    await stage.place(few * 3)
    by_node = {node: name for name, node in sorted((await stage.shop.pods()).items())}
    names = sorted((await stage.shop.pods()).keys() - by_node.values())

    async def flip() -> None:
        unready: set[str] = set()
        for _ in range(100):
            name = chance.choice(names)
            unready ^= {name}
            await stage.shop.set_ready(name, ready=name not in unready)
            await asyncio.sleep(chance.uniform(0.0, 0.1))
        for name in unready:
            await stage.shop.set_ready(name, ready=True)
        await stage.shop.await_weights(stage.places)

    await stage.check_unharmed("weights changed 100 times", flip(), unready=names)
    await stage.check_unharmed("back to 5 pods", stage.until_used(stage.place(few)), intervals=SOON)


@every_row
async def test_no_flow_breaks_when_gateway_processes_are_killed(stage: Stage) -> None:
    """Gateways are also killed after a node has briefly been without a ready pod: datagrams that
    went to other nodes meanwhile stay there, whatever the pinned tables and the other gateways
    contain."""
    name, node = min((await stage.shop.pods()).items())
    for ready in (False, True):
        await stage.shop.set_ready(name, ready=ready)
        await stage.shop.await_weights([each for each in stage.places if ready or each != node])
        await asyncio.sleep(AFTER * stage.shop.interval_s)

    async def kill() -> None:
        for gateway in stage.gateways:
            await stage.site.kill_role(gateway)
            await asyncio.sleep(0.5)
            await stage.site.start_role(gateway)
        await stage.shop.await_weights(stage.places)

    await stage.check_unharmed("gateway processes killed", kill())


LAYOUT = (
    "drivers/direct/maps/records.py",
    'FLOW = struct.Struct("=4s4x")',
    'FLOW = struct.Struct("=4s16x")',
)
"""The change of GROWN_FLOW to the C code, in Python."""


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a package of a later version, whose maps have another layout."""
    folder = tmp_path_factory.mktemp("newer")
    built = build(folder / "built", GROWN_FLOW, MORE_MAPS)
    package = folder / "fairlead"
    shutil.copytree(Path(fairlead.__file__).parent, package)
    for each in built.glob("*.o"):
        shutil.copy(each, package / "objects")
    file, before, after = LAYOUT
    text = (package / file).read_text()
    assert before in text
    (package / file).write_text(text.replace(before, after))
    return folder


@every_row
async def test_no_flow_breaks_when_gateways_are_upgraded_and_downgraded(
    stage: Stage, newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later version has other records in the kernel: the existing ones are migrated, one
    gateway after the other."""

    async def replace() -> None:
        for gateway in stage.gateways:
            (before,) = stage.site.directory.pins(gateway).glob("layout-*")
            await stage.site.kill_role(gateway)
            await stage.site.start_role(gateway)
            (after,) = stage.site.directory.pins(gateway).glob("layout-*")
            assert after != before
        await stage.shop.await_weights(stage.places)

    with monkeypatch.context() as environment:
        environment.setenv("PYTHONPATH", str(newer))
        await stage.check_unharmed("gateways upgraded", replace())
    await stage.check_unharmed("gateways as before", replace())


@every_row
async def test_no_flow_breaks_when_a_gateway_is_reinstalled(stage: Stage) -> None:
    """The network withdraws the gateway's routes, its machine dies, pods change meanwhile, and it
    returns with an empty kernel. The other gateways send it the flow entries that it cannot know.
    """
    *others, lost = stage.gateways
    before = stage.places

    async def rebuild() -> None:
        await stage.site.route_vips(others)
        await stage.site.kill_node(lost)
        stage.shop.gateways = others
        await stage.place([*before, before[0]])
        await stage.site.revive_node(lost)
        stage.shop.gateways = [*others, lost]
        await stage.shop.await_weights(stage.places)
        await stage.site.route_vips(stage.gateways)

    await stage.check_unharmed("a gateway rebuilt", rebuild(), few=10)
    await stage.check_unharmed("a pod less", stage.until_used(stage.place(before)), intervals=SOON)


@every_row
async def test_no_flow_breaks_while_controller_and_api_server_are_stopped(stage: Stage) -> None:
    server = process.one(stage.site.name, SERVER_LABEL)

    async def away() -> None:
        await stage.site.kill_role("control")
        server.send(signal.SIGSTOP)
        await asyncio.sleep(3)
        for gateway in stage.gateways:
            await stage.site.kill_role(gateway)
        await asyncio.sleep(2)
        server.send(signal.SIGCONT)
        await asyncio.gather(
            *(stage.site.start_role(host) for host in ("control", *stage.gateways))
        )
        await stage.shop.await_weights(stage.places)

    await stage.check_unharmed("controller and API server away", away())


@every_row
async def test_only_flows_of_a_dead_node_break(stage: Stage) -> None:
    """Only the node's own flows are lost. A client that connects before the gateways have noticed
    may have to retry; later clients do not."""
    dead = stage.places[-1]
    there = await stage.shop.pods()
    pods = {name for name, node in there.items() if node == dead}
    before, died_s, seen_s = stage.shop.down_verdicts(), time.monotonic(), math.inf

    async def die() -> None:
        nonlocal seen_s
        await stage.site.kill_node(dead)
        await stage.shop.await_weights([node for node in stage.places if node != dead])
        seen_s = time.monotonic()

    period = await stage.counts_during(
        "node killed", die(), intervals=math.ceil((SILENCE_S + 2) / stage.shop.interval_s)
    )
    print(
        f"all gateways had seen it {seen_s - died_s:.2f} s after it began to be killed", flush=True
    )
    pods_of_down_nodes = await stage.shop.pods_of_down_nodes(before)
    for name, count in period.items():
        lost = (
            pods | stage.gone if name.startswith("tcp") else pods | stage.gone | pods_of_down_nodes
        )
        assert count.broken.keys() | count.lost.keys() <= lost, name
        later = [what for begun_s, what in count.problems if begun_s > seen_s]
        failed = {what for what in later if what not in there}
        assert not failed, name
        assert len(later) <= LATE + count.new / LATE_OF, f"{name}: {later}"
    assert any(count.broken for count in period.values())
