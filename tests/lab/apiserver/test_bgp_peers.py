"""BGPPeers and the section `announce` of AddressPools on both API servers: what they accept and
refuse, and that what they accept can be used."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.lab.apiserver.api import Api, Failed
from tests.lab.apiserver.conftest import CIDRS
from tests.lab.apiserver.test_custom_resources import GROUP, Custom, printed

from fairlead.announce_checks import peer_problems, read_peer_spec, read_pool_section
from fairlead.announce_sections import BgpPeerSpec, PoolAnnounce
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.crds import BGP_PEERS
from fairlead.lab import crds
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.kubeapiserver import KubeApiServer

Object = dict[str, Any]
SOUND = {"asn": 64512, "address": "192.0.2.1"}
EVERYTHING = {
    "asn": 4294967294,
    "address": "2001:db8::1",
    "localASN": 4200000000,
    "port": 1179,
    "sourceAddress": "2001:db8::2",
    "nodeSelectors": [
        {"matchLabels": {"rack": "r1"}},
        {"matchExpressions": [{"key": "rack", "operator": "In", "values": ["r2"]}]},
    ],
    "passwordSecret": {"name": "bgp", "key": "tor"},
    "multihop": 3,
    "ttlSecurity": False,
    "holdTimeS": 30,
    "keepaliveTimeS": 10,
    "connectTimeS": 5,
    "bfd": {"intervalMs": 50, "multiplier": 3, "passive": True},
    "gracefulRestart": True,
    "gracefulRestartTimeS": 120,
    "longLivedStaleTimeS": 0,
    "families": ["IPv4", "IPv6"],
    "nextHops": ["192.0.2.128/25", "2001:db8::100/120"],
}
ANNOUNCE = {
    "method": "bgp",
    "interfaces": ["eth*", "192.0.2.0/24", "2001:db8::/64", "default-route"],
    "nodeSelectors": [{"matchLabels": {"rack": "r1", "topology.kubernetes.io/zone": "z"}}],
    "peers": ["tor-1"],
    "communities": ["64512:100", "4200000000:1:2", "no-export"],
    "localPreference": 4294967295,
    "aggregationLength": 28,
    "aggregationLengthV6": 64,
}


class Peers:
    """BGPPeers with a unique name."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.name = api.namespace
        self.path = f"{BGP_PEERS.path()}/{self.name}"

    async def create(self, spec: Object, query: dict[str, str] | None = None) -> Object:
        body = {
            "apiVersion": GROUP,
            "kind": "BGPPeer",
            "metadata": {"name": self.name},
            "spec": spec,
        }
        return await self.api.do("POST", BGP_PEERS.path(), body, query=query or {})


@pytest.fixture
async def peers(api: Api) -> AsyncIterator[Peers]:
    async with Client(api.access) as client:
        await crds.install(client)
    made = Peers(api)
    yield made
    await api.call("DELETE", made.path)


def fields(section: type[msgspec.Struct]) -> set[str]:
    return {each.encode_name for each in msgspec.structs.fields(section)}


def test_the_examples_have_every_field() -> None:
    alternatives = {"interface", "passwordFile"}
    assert EVERYTHING.keys() | alternatives == fields(BgpPeerSpec)
    assert ANNOUNCE.keys() == fields(PoolAnnounce)


@pytest.mark.parametrize(
    "spec",
    [
        SOUND,
        EVERYTHING,
        {"asn": "external", "interface": "eth0", "bfd": {}},
        {"asn": "internal", "address": "192.0.2.1", "passwordFile": "/etc/fairlead/password"},
        SOUND | {"ttlSecurity": True, "multihop": 0},
        SOUND | {"holdTimeS": 3, "keepaliveTimeS": 1},
    ],
)
async def test_what_the_server_accepts_is_stored_unchanged_and_can_be_used(
    peers: Peers, spec: Object
) -> None:
    made = await peers.create(spec, {"fieldValidation": "Strict"})
    assert made["spec"] == spec
    read = read_peer_spec(made["spec"])
    assert isinstance(read, BgpPeerSpec)
    assert list(peer_problems(read, 64513)) == []


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"address": "192.0.2.1"}, "spec.asn"),
        (SOUND | {"asn": 0}, "spec.asn"),
        (SOUND | {"asn": 4294967295}, "spec.asn"),
        (SOUND | {"asn": "64512"}, "spec.asn"),
        (SOUND | {"asn": 64512.5}, "spec.asn"),
        (SOUND | {"localASN": 4294967295}, "spec.localASN"),
        ({"asn": 64512}, "spec"),
        (SOUND | {"interface": "eth0"}, "spec"),
        (SOUND | {"port": 0}, "spec.port"),
        (SOUND | {"ttlSecurity": True, "multihop": 2}, "spec"),
        (SOUND | {"holdTimeS": 6}, "spec"),
        (SOUND | {"keepaliveTimeS": 4}, "spec"),
        (SOUND | {"gracefulRestart": True}, "spec"),
        (SOUND | {"bfd": {"intervalMs": 5}}, "spec.bfd.intervalMs"),
        (SOUND | {"families": ["IPX"]}, "spec.families[0]"),
        (SOUND | {"nextHops": [""]}, "spec.nextHops[0]"),
        (SOUND | {"passwordSecret": {}}, "spec.passwordSecret.name"),
    ],
)
async def test_what_can_never_be_used_is_refused(peers: Peers, spec: Object, field: str) -> None:
    with pytest.raises(Failed) as failed:
        await peers.create(spec)
    assert any(cause.startswith(f"{field}: ") for cause in failed.value.causes), failed.value.causes


@pytest.fixture
async def custom(api: Api) -> AsyncIterator[Custom]:
    async with Client(api.access) as client:
        await crds.install(client)
    made = Custom(api)
    yield made
    await api.call("DELETE", made.pool)


async def test_a_pool_has_a_section_announce(custom: Custom) -> None:
    made = await custom.create({"fieldValidation": "Strict"}, announce=ANNOUNCE)
    assert made["spec"]["announce"] == ANNOUNCE
    section, problem = read_pool_section(made["spec"]["announce"])
    assert section is not None
    assert (section.method, section.local_preference, problem) == ("bgp", 4294967295, "")


@pytest.mark.parametrize(
    ("announce", "field"),
    [
        ({"method": "arp"}, "spec.announce.method"),
        ({"communities": ["64512-100"]}, "spec.announce.communities[0]"),
        ({"localPreference": 4294967296}, "spec.announce.localPreference"),
        ({"aggregationLength": 33}, "spec.announce.aggregationLength"),
        ({"interfaces": ["eth0", "10.0.0.0/33"]}, "spec.announce.interfaces[1]"),
        ({"interfaces": ["2001:db8::/129"]}, "spec.announce.interfaces[0]"),
        ({"interfaces": ["eth 0"]}, "spec.announce.interfaces[0]"),
        (
            {"nodeSelectors": [{"matchLabels": {"rack": "r1", "a b": ""}}]},
            "spec.announce.nodeSelectors[0].matchLabels",
        ),
        (
            {"nodeSelectors": [{"matchExpressions": [{"key": "a b", "operator": "Exists"}]}]},
            "spec.announce.nodeSelectors[0].matchExpressions[0].key",
        ),
        (
            {"nodeSelectors": [{"matchLabels": "rack"}]},
            "spec.announce.nodeSelectors[0].matchLabels",
        ),
    ],
)
async def test_an_invalid_section_is_refused(custom: Custom, announce: Object, field: str) -> None:
    with pytest.raises(Failed) as failed:
        await custom.create(announce=announce)
    assert any(cause.startswith(f"{field}: ") for cause in failed.value.causes), failed.value.causes


async def test_both_servers_print_the_same_columns(real_apiserver: KubeApiServer) -> None:
    shown = []
    specs = (SOUND, EVERYTHING, {"asn": "external", "interface": "eth0"})
    async with (
        ApiServer(service_cidrs=CIDRS) as server,
        Api(Access(server.url), "embedded") as embedded,
        Api(real_apiserver.access, "real") as real,
    ):
        for api in (embedded, real):
            async with Client(api.access) as client:
                await crds.install(client)
            shown.append(
                [await printed(Custom(api), BGP_PEERS, spec, api.namespace) for spec in specs]
            )
    assert shown[0] == shown[1]
    names = [name for name, *_ in shown[1][0].columns[1:-1]]
    assert dict(zip(names, shown[1][0].cells, strict=True))["ASN"] == "64512"
