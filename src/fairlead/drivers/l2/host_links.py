"""The interfaces of this host on which addresses can be announced.

In: the selectors of the configuration. Out: `HostLinks`, and the names of the default
interfaces."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from fairlead.announce_sections import L2Config
from fairlead.drivers.l2.placing import MAX_INTERFACES, HostLinks, has_network
from fairlead.net import interfaces
from fairlead.net.selection import of_host, select

MAC_BYTES = 6
_REWRITES = "balance-alb"


def read_host_links() -> HostLinks:
    """Return the interfaces of this host. Raise Unavailable."""
    links = interfaces.links()
    return HostLinks(
        interfaces.present(routes=True),
        interfaces.networks(),
        {
            name: link.index
            for name, link in links.items()
            if name != "lo" and len(bytes.fromhex(link.mac.replace(":", ""))) == MAC_BYTES
        },
        tuple(name for name in links if _rewrites(name)),
    )


def default_selectors(section: L2Config, host: str, selectors: Sequence[str]) -> tuple[str, ...]:
    """Return the selectors of the interfaces where this host announces unless a pool selects other
    interfaces: those of the section; if it has none, those of the role."""
    return tuple(of_host(host, section.interfaces, section.interfaces_by_node) or selectors)


def default_names(
    chosen: Sequence[str],
    node_addresses: Callable[[], Sequence[str]],
    links: HostLinks,
) -> Sequence[str]:
    """Return the interfaces where this host announces unless a pool selects other interfaces: the
    interfaces of `default_selectors`; without any, the interfaces with the addresses of the node.
    If there are more than MAX_INTERFACES, such as those of all pods, the interfaces that are in no
    network are left out, because no address fits them; and then the last ones by name."""
    if chosen:
        names = select(chosen, links.present, links.former).names
        if len(names) <= MAX_INTERFACES:
            return names
        return sorted(each for each in names if has_network(each, links))[:MAX_INTERFACES]
    own = set(node_addresses())
    return [each.name for each in links.present if own.intersection(each.addresses)]


def _rewrites(name: str) -> bool:
    with suppress(OSError):
        return _REWRITES in Path("/sys/class/net", name, "bonding/mode").read_text()
    return False
