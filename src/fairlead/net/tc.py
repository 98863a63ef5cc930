"""Attach a program to what an interface receives, and see where it is attached.

In: a loaded program, an interface's index. Out: a filter of the clsact qdisc at ingress, in direct-action mode.
A filter is told by its name; priority and a fixed handle give it its place, so that replacing it is one step in the kernel,
with no packet between the old program and the new one. The qdisc is left when the last filter goes: others may use it.
Follows tc-bpf(8).
"""

import errno
from collections.abc import Collection
from typing import NamedTuple

from pyroute2.netlink.exceptions import NetlinkError

from fairlead.net.iproute import asking

_INGRESS = 0xFFFFFFF2
_HANDLE = 1
_ETH_P_ALL = 0x0003  # pyroute2 puts it into network byte order


class Filter(NamedTuple):
    """A program at an interface's ingress."""

    interface: int
    name: str
    priority: int


async def attach(interface: int, program: int, *, name: str, priority: int) -> None:
    """Put the program with this file descriptor at the interface's ingress, in place of what has the same priority."""
    async with asking(f"attaching {name} to interface {interface}") as route:
        try:
            await route.tc("add", "clsact", index=interface)
        except NetlinkError as error:
            if error.code != errno.EEXIST:
                raise
        await route.tc(
            "replace-filter",
            "bpf",
            index=interface,
            handle=_HANDLE,
            parent=_INGRESS,
            prio=priority,
            protocol=_ETH_P_ALL,
            fd=program,
            name=name,
            direct_action=True,
        )


async def filters(name: str, interfaces: Collection[int] | None = None) -> tuple[Filter, ...]:
    """The filters of this name, on these interfaces or on all of this network namespace."""
    found = []
    async with asking(f"listing the filters called {name}") as route:
        if interfaces is None:
            interfaces = [int(link["index"]) async for link in await route.link("dump")]
        for index in interfaces:
            try:
                dump = [message async for message in await route.get_filters(index=index, parent=_INGRESS)]
            except NetlinkError as error:
                if error.code in (errno.ENODEV, errno.EINVAL, errno.EOPNOTSUPP):
                    continue  # it went away, or has no clsact
                raise
            for message in dump:
                options = message.get_attr("TCA_OPTIONS")
                if message.get_attr("TCA_KIND") == "bpf" and options and options.get_attr("TCA_BPF_NAME") == name:
                    found.append(Filter(index, name, message["info"] >> 16))
    return tuple(found)


async def detach(filter_: Filter) -> None:
    """Take the filter away; that it is gone already is as good."""
    async with asking(f"detaching {filter_.name} from interface {filter_.interface}") as route:
        try:
            await route.tc(
                "del-filter",
                "bpf",
                index=filter_.interface,
                handle=_HANDLE,
                parent=_INGRESS,
                prio=filter_.priority,
                protocol=_ETH_P_ALL,
            )
        except NetlinkError as error:
            if error.code not in (errno.ENOENT, errno.ENODEV, errno.EINVAL):
                raise
