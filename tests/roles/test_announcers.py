"""The Announcers of gateways, and what the controller concludes from them about Services, on both
API servers.

The announcements are values that a test sets; the Announcer, the Lease, the conditions and the
Events are real objects."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest_asyncio
from structlog.testing import capture_logs
from tests.roles.cluster import GATEWAY, Cluster, until

from fairlead.announce_sections import AnnounceConfig, BgpConfig, BgpPeerConfig
from fairlead.drivers import Component
from fairlead.kube.announcers import (
    ANNOUNCERS,
    MAX_ADDRESSES,
    MAX_MORE,
    Announcer,
    announcer_name,
)
from fairlead.kube.events import EventRecorder
from fairlead.kube.lease_object import LEASES
from fairlead.kube.objects import SERVICES, ObjectKey
from fairlead.kube.presence import presence_of
from fairlead.lab import crds
from fairlead.model import Finding, Outcome, ServiceKey
from fairlead.role_state import (
    AddressConflict,
    AnnouncedAddress,
    AnnouncerMember,
    BgpSession,
    BgpState,
    L2State,
    Part,
)
from fairlead.roles.announcing.report import AnnouncerReport, NoAnnouncer, remove_announcer
from fairlead.roles.presence import Announcer as PresenceOfGateway
from fairlead.web import View

PROGRAM = Path(sys.executable).with_name("fairlead")
SINCE = "2026-11-01T10:00:00Z"
PEERS = (BgpPeerConfig(name="tor1", asn=64512, address="192.0.2.1"),)
L2 = AnnounceConfig(method="l2")
BGP = AnnounceConfig(method="bgp", bgp=BgpConfig(asn=64513, peers=PEERS))


class Announces(Component):
    """A component with a status that the test sets."""

    def __init__(self, state: Part | None = None) -> None:
        self.state = state

    def status(self) -> Part | None:
        return self.state


class Host:
    """A gateway on a host: its Lease, its Announcer, its Events."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.view = View("gateway", name)
        self.view.standing_by = lambda: True
        self.l2, self.bgp = Announces(), Announces()
        self._cluster = cluster
        self._uids: dict[ServiceKey, str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, *, lease: bool = True, announcer: bool = True) -> None:
        client = self._cluster.client
        recorder = EventRecorder(client, "fairlead-gateway")
        report = AnnouncerReport(
            client, self.view, [self.l2, self.bgp], recorder, self._uids.get, interval_s=0.1
        )
        await report.open()
        presence = PresenceOfGateway(client, self._cluster.presence, self.view, self.view.node_name)
        runs = [recorder.run()]
        runs += [report.run()] if announcer else []
        runs += [presence.run()] if lease else []
        self._tasks += [asyncio.ensure_future(each) for each in runs]

    async def know(self, name: str) -> None:
        """Read the uid of a Service, as the watch of a gateway would."""
        key = ObjectKey(self._cluster.namespace, name)
        found = await self._cluster.client.get(SERVICES, key)
        self._uids[found.key] = found.metadata.uid

    async def stop(self) -> None:
        """Stop as if the host had failed: Lease and Announcer stay."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def announcer(self) -> Announcer:
        key = ObjectKey("", announcer_name("gateway", self.view.node_name))
        return await self._cluster.client.get(ANNOUNCERS, key)


@pytest_asyncio.fixture
async def hosts(cluster: Cluster) -> AsyncIterator[list[Host]]:
    """Two gateways that announce nothing yet, instead of the gateway of the cluster."""
    await cluster.stop()
    made = [Host(cluster, GATEWAY), Host(cluster, "gw2")]
    yield made
    await cluster.stop_controller()
    for host in made:
        await host.stop()
        await remove_announcer(cluster.client, "gateway", host.view.node_name)


async def serve(cluster: Cluster, announce: AnnounceConfig) -> str:
    """Start a controller and a Service. Return the address of the Service."""
    cluster.announce = announce
    await cluster.start_controller(gateway=False)
    await cluster.set_endpoints("web", ("10.244.1.1", "life-1", True))
    await cluster.apply("web")
    (address,) = await cluster.addresses("web")
    return address


def by_l2(cluster: Cluster, address: str, cause: str = "") -> L2State:
    services = (f"{cluster.namespace}/web",)
    return L2State(("eth0",), (AnnouncedAddress(address, services, SINCE, ("eth0",), cause=cause),))


def by_bgp(cluster: Cluster, address: str, *, error: str = "") -> BgpState:
    """Return the state of a host with one session; `error`: why the session is down."""
    services = (f"{cluster.namespace}/web",)
    session = BgpSession("tor1", "192.0.2.1", "down" if error else "established", SINCE, error)
    peers: Sequence[str] = () if error else ("tor1",)
    return BgpState(
        addresses=(AnnouncedAddress(address, services, SINCE, peers=tuple(peers)),),
        sessions=(session,),
    )


async def test_a_service_is_ready_while_a_live_gateway_announces_its_address(
    cluster: Cluster, hosts: list[Host]
) -> None:
    first, second = hosts
    await first.start()
    address = await serve(cluster, L2)
    found = await cluster.has(
        "web", Accepted="True/Accepted", Programmed="True/Programmed", Ready="False/NotAnnounced"
    )
    assert found["Ready"]["message"] == (
        f"no gateway announces {address} (method l2); see `kubectl get announcers -o wide`, and "
        "`fairlead status` on the hosts"
    )
    await cluster.described("web", "Warning", "NotAnnounced", f"no gateway announces {address}")

    first.l2.state = by_l2(cluster, address)
    await cluster.has("web", Ready="True/EndpointsReady")

    # The host fails: the object still shows the address, but no process renews the Lease.
    await second.start()
    await first.stop()
    await cluster.has("web", Ready="False/NotAnnounced")
    shown = (await first.announcer()).status
    assert shown is not None
    assert [each.address for each in shown.addresses] == [address]

    second.l2.state = by_l2(cluster, address, "because gw1 is gone")
    await cluster.has("web", Ready="True/EndpointsReady")
    await cluster.described("web", "NotAnnounced no longer holds")


async def test_a_service_without_any_established_session_is_not_ready(
    cluster: Cluster, hosts: list[Host]
) -> None:
    for host in hosts:
        await host.start()
    address = await serve(cluster, BGP)
    for host in hosts:
        host.bgp.state = by_bgp(cluster, address)
    await cluster.has("web", Ready="True/EndpointsReady")

    refused = "Connection refused"
    hosts[0].bgp.state = by_bgp(cluster, address, error=refused)
    hosts[1].bgp.state = by_bgp(cluster, address, error="Hold timer expired")
    found = await cluster.has("web", Ready="False/NotAnnounced")
    assert found["Ready"]["message"].startswith(
        f"{address} is not announced: no BGP session is established on gw1: tor1 (192.0.2.1): "
        f"{refused}; gw2: tor1 (192.0.2.1): Hold timer expired"
    )
    await cluster.described("web", "Warning", "NotAnnounced", refused)
    hosts[0].bgp.state = by_bgp(cluster, address)
    await cluster.has("web", Ready="True/EndpointsReady")


async def test_a_service_stays_ready_while_one_of_two_gateways_announces_it(
    cluster: Cluster, hosts: list[Host]
) -> None:
    """The gateway without a session still serves the Service, and writes a Warning of its own."""
    for host in hosts:
        await host.start()
    address = await serve(cluster, BGP)
    for host in hosts:
        host.bgp.state = by_bgp(cluster, address)
    await cluster.has("web", Ready="True/EndpointsReady")
    since = (await cluster.conditions("web"))["Ready"]["lastTransitionTime"]

    key = ServiceKey(cluster.namespace, "web")
    hosts[0].bgp.state = by_bgp(cluster, address, error="Connection refused")
    hosts[0].view.record({}, {key: Outcome("unavailable", "no session", coarse=True)})

    async def seen() -> bool:
        status = (await hosts[0].announcer()).status
        return status is not None and status.established == "0/1"

    await until(seen, "the session that is down")
    times: set[str | None] = set()

    async def renewed() -> bool:
        """Return whether the Lease was renewed so often that it would name the Service."""
        found = await cluster.client.list(LEASES, namespace=cluster.namespace)
        times.update(
            each.spec.renew_time
            for each in found
            if (record := presence_of(each)) is not None and record.name == GATEWAY
        )
        return len(times) > 3

    await until(renewed, "renewals of the Lease")
    ready = (await cluster.conditions("web"))["Ready"]
    assert (ready["status"], ready["lastTransitionTime"]) == ("True", since)


async def test_a_session_that_goes_down_is_one_event_on_the_announcer(
    cluster: Cluster, hosts: list[Host]
) -> None:
    (host, _) = hosts
    host.bgp.state = by_bgp(cluster, "203.0.113.20")
    await host.start()

    async def events() -> list[str]:
        found = json.loads(
            await cluster.kubectl(
                "get",
                "events",
                "-n",
                "default",
                "--field-selector",
                "involvedObject.kind=Announcer",
                "-o",
                "json",
            )
        )["items"]
        uid = (await host.announcer()).metadata.uid
        return [
            f"{each['type']} {each['reason']}: {each['message']}"
            for each in found
            if each["involvedObject"]["uid"] == uid
        ]

    async def established() -> bool:
        status = (await host.announcer()).status
        return status is not None and status.established == "1/1"

    async def written() -> bool:
        try:
            return await established()
        except Exception:
            return False

    await until(written, "the Announcer")
    host.bgp.state = by_bgp(cluster, "203.0.113.20", error="Hold timer expired")

    async def down() -> bool:
        return await events() == [
            "Warning BgpSessionDown: gateway gw1: the BGP session with tor1 (192.0.2.1) is down: "
            "Hold timer expired"
        ]

    await until(down, "the Event of the session")
    host.bgp.state = by_bgp(cluster, "203.0.113.20")

    async def up() -> bool:
        return len(await events()) == 2

    await until(up, "the Event of the session that is established again")
    finding = Finding("PeerRefused", "BGP peer tor2 is not used: x", subject="BGPPeer tor2")
    host.bgp.state = msgspec.structs.replace(host.bgp.state, findings=(finding,))

    async def refused() -> bool:
        return "Warning PeerRefused: gateway gw1: BGP peer tor2 is not used: x" in await events()

    await until(refused, "the Event of the refused peer beside the session that works")


async def test_kubectl_shows_announcers(cluster: Cluster, hosts: list[Host]) -> None:
    (host, _) = hosts
    finding = Finding("PeerRefused", "BGP peer tor2 is not used: x", subject="BGPPeer tor2")
    host.bgp.state = msgspec.structs.replace(by_bgp(cluster, "203.0.113.20"), findings=(finding,))
    host.l2.state = L2State(
        ("eth0",),
        (AnnouncedAddress("2001:db8::1", ("default/six",), SINCE, ("eth0",)),),
        (AnnouncerMember("gw2", "eth0", "ready", SINCE),),
        (AddressConflict("2001:db8::1", "eth0", "02:00:00:00:00:09", (), SINCE, SINCE),),
    )
    await host.start()

    async def shown() -> list[list[str]] | None:
        text = await cluster.kubectl("get", "ann")
        rows = [line.split() for line in text.splitlines()]
        return rows if len(rows) > 1 else None

    header, *rows = await until(shown, "the Announcer")
    assert header == [
        "NAME",
        "ROLE",
        "HOST",
        "METHOD",
        "ADDRESSES",
        "SESSIONS",
        "CONFLICTS",
        "READY",
        "OBSERVED",
        "PROBLEM",
    ]
    (row,) = (each for each in rows if each[0] == "gateway-gw1")
    assert row[1:8] == ["gateway", "gw1", "bgp,l2", "2", "1/2", "1", "true"]
    assert " ".join(row[9:]) == "BGP peer tor2 is not used: x"


async def test_an_announcer_has_a_limited_size(cluster: Cluster, hosts: list[Host]) -> None:
    (host, _) = hosts
    many = MAX_ADDRESSES + MAX_MORE + 5
    host.bgp.state = BgpState(
        addresses=tuple(
            AnnouncedAddress(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}", ("a/b",) * 30, peers=("t",))
            for n in range(many)
        ),
        sessions=tuple(
            BgpSession(f"p{n}", "192.0.2.1", "established", SINCE, "x" * 5000) for n in range(200)
        ),
    )
    await host.start()

    async def written() -> Announcer | None:
        found = {each.metadata.name: each for each in await cluster.client.list(ANNOUNCERS)}
        return found.get("gateway-gw1")

    found = await until(written, "the Announcer")
    status = found.status
    assert (status.address_count, len(status.addresses), len(status.more_addresses)) == (
        many,
        MAX_ADDRESSES,
        MAX_MORE,
    )
    assert not status.complete
    assert (status.established, len(status.sessions)) == ("200/200", 100)


async def test_without_announcers_it_is_unknown_what_gateways_announce(
    cluster: Cluster, hosts: list[Host]
) -> None:
    """The gateway has no right to write its Announcer: the Service is not called unready, because
    it may be announced."""
    (host, _) = hosts
    await host.start(announcer=False)
    address = await serve(cluster, L2)
    await cluster.has("web", Ready="True/EndpointsReady")
    await cluster.described(
        "web", "Warning", "NotAnnounced", f"it is not known whether {address} is announced: gw1"
    )


async def test_a_controller_without_the_crd_says_so_once_and_reports_nothing(
    cluster: Cluster, hosts: list[Host], real: object
) -> None:
    if real is not None:
        # Other tests use the CRDs of the shared server.
        await cluster.client.list(ANNOUNCERS)
        return
    await cluster.kubectl("delete", "crd", "announcers.fairlead.io")
    (host, _) = hosts
    await host.start(announcer=False)
    with capture_logs() as logs:
        await serve(cluster, L2)
        await cluster.has("web", Ready="True/EndpointsReady")
    said = [each for each in logs if "Announcers cannot be read" in each["event"]]
    assert len(said) == 1
    assert "kubectl apply --server-side -f deploy/crds" in said[0]["fix"]
    await crds.install(cluster.client)
    await cluster.has("web", Ready="False/NotAnnounced")


async def test_an_event_tells_which_host_begins_to_announce_an_address(
    cluster: Cluster, hosts: list[Host]
) -> None:
    """A new process of the host repeats no Event about what its predecessor announced."""
    (host, _) = hosts
    await host.start()
    address = await serve(cluster, BGP)
    await host.know("web")
    host.bgp.state = by_bgp(cluster, address)
    await cluster.described(
        "web", "Normal", "AddressAnnounced", f"gateway gw1 announces {address} to tor1"
    )
    await host.stop()
    await host.start()
    known = by_bgp(cluster, address)
    other = AnnouncedAddress("203.0.113.99", (), SINCE, peers=("tor1",))
    host.bgp.state = msgspec.structs.replace(known, addresses=(*known.addresses, other))

    async def both() -> bool:
        status = (await host.announcer()).status
        return status is not None and status.address_count == 2

    await until(both, "the second address")
    (event,) = await cluster.events("web", reason="AddressAnnounced")
    assert event["count"] == 1


async def test_status_of_the_cluster_shows_who_announces_and_who_is_gone(
    cluster: Cluster, hosts: list[Host], tmp_path: Path
) -> None:
    first, second = hosts
    first.l2.state = by_l2(cluster, "203.0.113.20")
    second.bgp.state = by_bgp(cluster, "203.0.113.20", error="Hold timer expired")
    for host in hosts:
        await host.start()

    async def renewed() -> bool:
        found = await cluster.client.list(LEASES, namespace=cluster.namespace)
        return len(found) == 2 and len(await cluster.client.list(ANNOUNCERS)) == 2

    await until(renewed, "Leases and Announcers")
    await first.stop()
    config = tmp_path / "fairlead.yaml"
    config.write_text(f"presence: {{namespace: {cluster.namespace}}}\n")
    command = ("status", "--cluster", "--kubeconfig", cluster.kubeconfig, "--config", config)

    async def status(*options: str) -> str:
        process = await asyncio.create_subprocess_exec(
            PROGRAM, *command, *options, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        assert process.returncode == 0
        return output.decode()

    shown = " ".join((await status()).split())
    service = f"{cluster.namespace}/web"
    gone = r"gateway gw1 \(gone: not seen for \d+ s, last renewed at \S+\)"
    assert re.search(rf"203.0.113.20 {service} {gone} l2 eth0 {SINCE}", shown)
    assert f"203.0.113.20 {service} gateway gw2 bgp no peer {SINCE}" in shown
    assert f"gateway gw2 tor1 192.0.2.1 down {SINCE} - Hold timer expired" in shown
    states = json.loads(await status("-o", "json"))
    assert {each["name"]: (each["state"], each["announcer"]["method"]) for each in states} == {
        GATEWAY: ("gone", "l2"),
        "gw2": ("ready", "bgp"),
    }


async def test_a_role_that_announces_nothing_removes_its_announcer(
    cluster: Cluster, hosts: list[Host]
) -> None:
    (host, _) = hosts
    await host.start()

    async def exists() -> bool:
        return any(
            each.metadata.name == "gateway-gw1" for each in await cluster.client.list(ANNOUNCERS)
        )

    await until(exists, "the Announcer")
    await host.stop()
    await NoAnnouncer(cluster.client, host.view).run()
    assert not await exists()
