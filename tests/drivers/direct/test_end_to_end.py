"""Real packets through a real gateway process, between namespaces: shares, and open connections
across changes and restarts."""

import asyncio
import socket
from collections import Counter

import pytest
from tests.drivers.direct.site import (
    CLIENT,
    DEADLINE_S,
    PINS,
    SITE,
    VIP,
    Conversation,
    made_site,  # noqa: F401 - a fixture
    pods,
    request_by_udp,
    running_gateway,
    shown_filters,
)

from fairlead.drivers.direct.maps.records import DROPS
from fairlead.lab import namespace

pytestmark = pytest.mark.root

TCP_REPAIR = 19
"""Of linux/tcp.h."""


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["ipv4", "ipv6"])
async def test_pods_see_the_client_and_get_their_shares(site: None, family: int) -> None:
    async with pods(), running_gateway() as gateway:
        await gateway.serve({"node1": 3, "node2": 1})
        tcp = [await (await Conversation.start(family)).ask() for _ in range(120)]
        udp = [await request_by_udp(family) for _ in range(120)]
        for answers in (tcp, udp):
            assert {peer for _, peer in answers} == {CLIENT[family]}
            shares = Counter(node for node, _ in answers)
            assert shares.keys() == {"node1", "node2"}
            assert 60 < shares["node1"] < 118  # expected 90, with a standard deviation of 4.7
        answer = await gateway.send("")
        assert answer["drops"] == dict.fromkeys(DROPS, 0)
        ((_, packets, _, flows),) = answer["counters"]
        # All connections, and most of the datagrams, are new flows. A UDP socket may get the port
        # of an earlier socket; its datagram then belongs to a known flow.
        assert flows > 120
        assert packets > flows


async def test_open_connections_survive_changes_and_the_gateways_death(site: None) -> None:
    families = (socket.AF_INET, socket.AF_INET6)
    talks: list[tuple[Conversation, str]] = []

    async def start_some() -> set[str]:
        new = [await Conversation.start(family) for family in families for _ in range(15)]
        talks.extend([(talk, (await talk.ask())[0]) for talk in new])
        return {node for _, node in talks[-30:]}

    async def check_all() -> None:
        assert [(await talk.ask())[0] for talk, _ in talks] == [node for _, node in talks]

    async with pods():
        async with running_gateway() as gateway:
            await gateway.serve({"node1": 1, "node2": 1})
            assert await start_some() == {"node1", "node2"}
            await gateway.serve({"node1": 1, "node2": 1, "node3": 30})
            assert "node3" in await start_some()
            await check_all()
            before = await gateway.serve(
                {"node1": 1, "node2": 40, "node3": 1}, {"node3": "draining"}
            )
            assert "node3" not in await start_some()
            await check_all()
            gateway.kill()
        assert f"fairlead:{PINS}" in shown_filters()
        assert await start_some() <= {"node1", "node2"}
        await check_all()
        async with running_gateway() as successor:
            assert (await successor.send(""))["actual"] == before["actual"]
            await check_all()
            await successor.serve({"node1": 1, "node2": 1, "node3": 1})
            await check_all()
            await successor.send("remove")
            assert successor.process.wait(DEADLINE_S) == 0
    assert not PINS.exists()
    assert shown_filters() == ""


async def test_a_client_may_use_the_port_of_a_connection_that_only_the_pod_still_has(
    site: None,
) -> None:
    """The client gave the connection up while its packets were lost. The pod answers its next SYN
    with an ACK of the old connection, and the client resets that one (RFC 9293, 3.5.1)."""
    vip = (VIP[socket.AF_INET], 80)
    loop = asyncio.get_running_loop()
    async with pods(), running_gateway() as gateway:
        await gateway.serve({"node2": 1})
        old = await Conversation.start(socket.AF_INET)
        assert (await old.ask())[0] == "node2"
        sock = old.writer.get_extra_info("socket")
        port = sock.getsockname()[1]
        sock.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)  # closing sends nothing
        old.writer.transport.abort()
        await asyncio.sleep(0)
        await gateway.serve({"node1": 1})
        # Every slot moves from node1 to node2, so it is in transition.
        await gateway.serve({"node1": 1, "node2": 1}, {"node1": "draining"})
        with namespace.make_socket(SITE + "client", socket.AF_INET) as again:
            again.setblocking(False)
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("", port))
            async with asyncio.timeout(DEADLINE_S / 2):
                await loop.sock_connect(again, vip)
                await loop.sock_sendall(again, b"who\n")
                assert (await loop.sock_recv(again, 100)).split()[0] == b"node2"
