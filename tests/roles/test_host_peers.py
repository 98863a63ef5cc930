"""What a host that announces addresses reads from the API: pools, BGP peers with their passwords,
and the id of the cluster; and what happens without a CRD or a right."""

import asyncio
import base64
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from fairlead.announce_sections import BgpConfig, BgpPeerConfig, SecretRef
from fairlead.drivers.bgp import Peer
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.crds import ADDRESS_POOLS, BGP_PEERS
from fairlead.kube.freshness import Freshness
from fairlead.kube.objects import Node, ObjectKey
from fairlead.lab import crds
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.kubeapiserver import KubeApiServer
from fairlead.roles import host_peers
from fairlead.roles.announce_feed import AnnounceFeed, ClusterId
from fairlead.roles.host_peers import HostPeers
from fairlead.state import State

DEADLINE_S = 30.0
HOST = "gw1"
KEPT = "a password keeps its former value"
Object = dict[str, Any]


async def until(what: str, holds: Callable[[], bool]) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"waited {DEADLINE_S:g} s without success until {what}") from None


@asynccontextmanager
async def running(*works: Awaitable[None]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(each) for each in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def client(access: Access) -> AsyncIterator[Client]:
    async with Client(access) as client:
        yield client


def events_of(logs: list[EventDict]) -> list[str]:
    return [each["event"] for each in logs]


def peer_body(name: str, **spec: object) -> Object:
    fields = {"asn": 64512, "address": "192.0.2.1"} | spec
    return {"metadata": {"name": name}, "spec": fields}


def state_with(labels: Mapping[str, str] | None = None) -> State:
    """Return a complete State in which this host has a Node with these labels; None: no Node."""
    state = State(("nodes",))
    if labels is not None:
        node = msgspec.convert({"metadata": {"name": HOST, "labels": labels}}, Node)
        state.update_nodes({ObjectKey("", HOST): node})
    state.mark_synced("nodes")
    return state


async def test_pools_and_peers_are_followed(client: Client) -> None:
    state, name = State(("addresspools", "bgppeers")), f"feed-{secrets.token_hex(3)}"
    pool = {"metadata": {"name": name}, "spec": {"addresses": ["198.51.100.1"]}}
    async with running(AnnounceFeed(client, state, Freshness(lambda: 0.0)).run()):
        async with asyncio.timeout(DEADLINE_S):
            await state.has_synced.wait()
        assert state.bgp_peers is not None
        await client.create(BGP_PEERS, peer_body(name))
        await client.create(ADDRESS_POOLS, pool)
        try:
            await until(
                "both objects are there",
                lambda: name in (state.bgp_peers or {}) and name in state.pools,
            )
        finally:
            await client.delete(BGP_PEERS, ("", name))
            await client.delete(ADDRESS_POOLS, ("", name))
        await until("both are gone", lambda: not state.bgp_peers and name not in state.pools)


async def test_without_the_crds_the_configuration_applies_and_the_log_says_so_once() -> None:
    state = State(("addresspools", "bgppeers"))
    async with (
        ApiServer(service_cidrs=("10.96.0.0/16",)) as server,
        Client(Access(server.url)) as client,
    ):
        with capture_logs() as logs:
            async with running(AnnounceFeed(client, state, Freshness(lambda: 0.0)).run()):
                async with asyncio.timeout(DEADLINE_S):
                    await state.has_synced.wait()
                assert state.bgp_peers is None
                asked = len(server.requests)
                await until("the watch was repeated", lambda: len(server.requests) > asked + 3)
                await crds.install(client)
                await until("the CRDs are used", lambda: not state.absent)
                assert state.bgp_peers == {}
    said = sorted(each["event"] for each in logs if "does not serve" in each["event"])
    assert said == [
        "the API server does not serve AddressPool: until it does, addresses are assigned only "
        "from the pools of the configuration",
        "the API server does not serve BGPPeer: until it does, there are only the BGP peers of the "
        "configuration",
    ]


async def test_without_the_rights_the_configuration_applies_and_the_log_says_so_once(
    real_apiserver: KubeApiServer,
) -> None:
    """As after an upgrade of the program without its ClusterRole."""
    namespace = f"rights-{secrets.token_hex(3)}"
    async with Client(real_apiserver.access) as admin:
        await crds.install(admin)
        await admin.request("POST", "/api/v1/namespaces", body={"metadata": {"name": namespace}})
        accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        await admin.request("POST", accounts, body={"metadata": {"name": "me"}})
    token = await real_apiserver.service_account_token(f"{namespace}/me")
    access = msgspec.structs.replace(
        real_apiserver.access, token=token, certificate_pem="", key_pem=""
    )
    state = State(("addresspools", "bgppeers"))
    secret = BgpPeerConfig(
        name="tor", asn=64512, address="192.0.2.1", password_secret=SecretRef("bgp")
    )
    section = BgpConfig(asn=64513, peers=(secret,))
    with capture_logs() as logs:
        async with Client(access) as client:
            async with running(AnnounceFeed(client, state, Freshness(lambda: 0.0)).run()):
                async with asyncio.timeout(DEADLINE_S):
                    await state.has_synced.wait()
            assert state.bgp_peers is None
            cluster = ClusterId(client)
            await cluster.open()
            assert cluster() == ""
            (peer,) = await peers_of(client, state_with(), section, namespace)
    assert "may not" in str(peer.problem) or "cannot get resource" in str(peer.problem)
    assert "add its name to passwordSecrets of the chart" in str(peer.problem)
    said = events_of(logs)
    for kind in ("AddressPool", "BGPPeer"):
        assert (
            len([each for each in said if each.startswith(f"no permission to watch {kind}")]) == 1
        )
    assert any("cannot read namespace kube-system" in each for each in said)


async def test_the_id_of_the_cluster_is_that_of_kube_system(client: Client) -> None:
    cluster = ClusterId(client)
    await cluster.open()
    shown = msgspec.json.decode(await client.request("GET", "/api/v1/namespaces/kube-system"))
    assert cluster() == shown["metadata"]["uid"] != ""


async def peers_of(
    client: Client, state: State, section: BgpConfig, namespace: str = "default"
) -> tuple[Peer, ...]:
    found = HostPeers(client, state, section, HOST, namespace)
    async with asyncio.timeout(DEADLINE_S):
        await found.open()
    return tuple(found())


async def test_peers_are_selected_by_the_labels_of_the_node(client: Client) -> None:
    selector = [{"matchLabels": {"rack": "r1"}}]
    bodies = {"all": peer_body("all"), "r1": peer_body("r1", nodeSelectors=selector)}
    for labels, names in (({"rack": "r1"}, ["all", "r1"]), ({}, ["all"]), (None, ["all"])):
        state = state_with(labels)
        state.update_bgp_peers(
            {
                ObjectKey("", name): msgspec.convert(body, BGP_PEERS.type)
                for name, body in bodies.items()
            }
        )
        found = await peers_of(client, state, BgpConfig(asn=64513))
        assert [each.name for each in found] == names


async def test_a_deleted_node_ends_no_session(client: Client) -> None:
    state = state_with({"rack": "r1"})
    spec = peer_body("r1", nodeSelectors=[{"matchLabels": {"rack": "r1"}}])
    state.update_bgp_peers({ObjectKey("", "r1"): msgspec.convert(spec, BGP_PEERS.type)})
    peers = HostPeers(client, state, BgpConfig(asn=64513), HOST, "default")
    changes: list[object] = []
    peers.changed = lambda: changes.append(None)
    await peers.open()
    async with running(peers.run()):
        state.update_nodes({ObjectKey("", HOST): None})
        other = msgspec.convert(peer_body("other"), BGP_PEERS.type)
        state.update_bgp_peers({ObjectKey("", "other"): other})
        await until("the new peer is there", lambda: len(changes) > 1)
    assert [each.name for each in peers()] == ["other", "r1"]


async def test_a_password_is_read_from_a_file_and_again_when_it_changes(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_peers, "REREAD_S", 0.0)
    (path := tmp_path / "password").write_text("first\n")
    peer = BgpPeerConfig(name="tor", asn=64512, address="192.0.2.1", password_file=str(path))
    peers = HostPeers(client, state_with(), BgpConfig(asn=64513, peers=(peer,)), HOST, "default")
    await peers.open()
    assert [each.password for each in peers()] == ["first"]
    async with running(peers.run()):
        path.write_text("second\n")
        await until("the new one is read", lambda: peers()[0].password == "second")
        path.unlink()
        with capture_logs() as logs:
            await until("it was tried again", lambda: KEPT in events_of(logs))
    assert peers()[0].password == "second"
    assert "second" not in repr(peers())


async def test_a_missing_file_refuses_its_peer_alone(client: Client) -> None:
    peers = (
        BgpPeerConfig(name="a", asn=64512, address="192.0.2.1", password_file="/nonexistent/p"),
        BgpPeerConfig(name="b", asn=64512, address="192.0.2.2"),
    )
    first, second = await peers_of(client, state_with(), BgpConfig(asn=64513, peers=peers))
    assert (
        "passwordFile /nonexistent/p cannot be read: No such file or directory; create it where "
        "this role can read it; in a pod, set passwordSecret"
    ) in str(first.problem)
    assert (second.problem, second.password) == (None, "")


async def test_a_password_is_read_from_a_secret_once_it_exists(
    real_apiserver: KubeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_peers, "REREAD_S", 0.0)
    namespace = f"secret-{secrets.token_hex(3)}"
    peer = BgpPeerConfig(
        name="tor", asn=64512, address="192.0.2.1", password_secret=SecretRef("bgp", "tor")
    )
    section = BgpConfig(asn=64513, peers=(peer,))
    path = f"/api/v1/namespaces/{namespace}/secrets"
    async with Client(real_apiserver.access) as client:
        await client.request("POST", "/api/v1/namespaces", body={"metadata": {"name": namespace}})
        peers = HostPeers(client, state_with(), section, HOST, namespace)
        await peers.open()
        assert f"Secret {namespace}/bgp does not exist; create it" in str(peers()[0].problem)

        def secret(**data: bytes) -> Object:
            texts = {key: base64.b64encode(text).decode() for key, text in data.items()}
            return {"metadata": {"name": "bgp"}, "data": texts}

        async with running(peers.run()):
            await client.request("POST", path, body=secret(password=b"other"))
            await until("its key is missing", lambda: "has no key tor" in str(peers()[0].problem))
            await client.request("PUT", f"{path}/bgp", body=secret(tor=b"\xff"))
            await until("it is no text", lambda: "is not text" in str(peers()[0].problem))
            await client.request("PUT", f"{path}/bgp", body=secret(tor=b"hidden\n"))
            await until("it is read", lambda: peers()[0].password == "hidden")
            assert peers()[0].problem is None
            await client.request("DELETE", f"{path}/bgp")
            with capture_logs() as logs:
                await until("it was tried again", lambda: KEPT in events_of(logs))
        assert (peers()[0].password, peers()[0].problem) == ("hidden", None)


async def test_a_password_file_that_has_no_end_refuses_its_peer_alone(
    client: Client, tmp_path: Path
) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    writer = os.open(path, os.O_RDWR)  # a reader waits for data, and not for a writer
    try:
        peers = (
            BgpPeerConfig(name="a", asn=64512, address="192.0.2.1", password_file=str(path)),
            BgpPeerConfig(name="b", asn=64512, address="192.0.2.2"),
        )
        first, second = await peers_of(client, state_with(), BgpConfig(asn=64513, peers=peers))
    finally:
        os.close(writer)
    assert "it is not a regular file" in str(first.problem)
    assert second.problem is None


async def test_a_secret_that_the_server_cannot_return_does_not_hold_up_other_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_peers, "PATIENCE_S", 0.1)
    peers = (
        BgpPeerConfig(
            name="a", asn=64512, address="192.0.2.1", password_secret=SecretRef("sealed")
        ),
        BgpPeerConfig(name="b", asn=64512, address="192.0.2.2"),
    )
    async with Client(Access("http://127.0.0.1:1")) as client:  # nothing listens there
        first, second = await peers_of(client, state_with(), BgpConfig(asn=64513, peers=peers))
    assert "Secret default/sealed cannot be read" in str(first.problem)
    assert second.problem is None
