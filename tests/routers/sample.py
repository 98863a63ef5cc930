"""Plans for routers that tests use, and the files with the texts of routers that no test can run.

`python -m tests.routers.sample` writes the files again. Read the difference before committing it:
a router would get exactly this text."""

from pathlib import Path

from fairlead.announce_sections import AnnounceConfig, BfdConfig, BgpConfig, BgpPeerConfig
from fairlead.config import PoolConfig
from fairlead.routers import reach, text
from fairlead.routers.values import Hop, Method, Reach, Router

TEXTS = Path(__file__).with_name("texts")
ROUTERS: tuple[Router, ...] = ("frr", "bird", "junos", "ios", "sonic")
POOLS = (
    PoolConfig("main", ("203.0.113.0/28", "2001:db8:f::/120")),
    PoolConfig("shops", ("198.51.100.6-198.51.100.9",)),
)
HOPS = (
    Hop("gw2", ("192.0.2.12", "2001:db8:2::12"), ("eth0",)),
    Hop("gw1", ("192.0.2.11", "2001:db8:2::11"), ("eth0",)),
)
PEER = BgpPeerConfig(name="tor", address="192.0.2.1", asn=64512, bfd=BfdConfig())
ANNOUNCE = AnnounceConfig(method="bgp", bgp=BgpConfig(asn=64513, peers=(PEER,)))


def planned(method: Method) -> Reach:
    """Return the plan of the sample."""
    return reach.plan(POOLS, HOPS, ANNOUNCE, reach.Request(method=method))


def texts() -> dict[str, str]:
    """Return the text of each router and method, by the name of its file."""
    return {
        f"{router}-{method}.txt": text.render(planned(method), router)
        for router in ROUTERS
        for method in ("static", "bgp")
    } | {"linux-static.txt": text.render(planned("static"), "linux")}


if __name__ == "__main__":
    for name, content in texts().items():
        (TEXTS / name).write_text(content)
