"""What a lab needs of this machine, tried out in a namespace of its own before anything is built.

In: nothing. Out: nothing, or one Refused that names everything that is missing, what it is for, and
what works without it. Trying beats asking for a version: kernels are configured, patched and locked
down in more ways than they are numbered."""

import os
from collections.abc import Awaitable, Callable

from fairlead.errors import FairleadError, Refused
from fairlead.invocation import called
from fairlead.lab import namespace

Trial = Callable[[str], Awaitable[None]]


def check_root() -> None:
    """Raise Refused unless this process runs as root. Call it first: without root no other problem
    can be solved."""
    if os.geteuid() != 0:
        raise Refused(
            "this needs root: it makes network namespaces, loads eBPF and writes nftables rules",
            fix=f"run it as root; `{called('plan')}` works without root",
        )


async def check() -> None:
    """Raise Refused unless a whole lab can run here."""
    check_root()
    name = f"flcheck-{os.getpid()}"
    try:
        namespace.create(name)
    except OSError as error:
        what = f"creating a network namespace failed: {error.strerror}"
        raise Refused(f"{what}; `{called('plan')}` works without one") from error
    try:
        missing = [
            f"- {what}: {problem}"
            for what, trial in TRIALS.items()
            if (problem := await _problem(trial, name))
        ]
    finally:
        namespace.delete(name)
    if missing:
        raise Refused(
            "this machine lacks what a lab needs:\n"
            + "\n".join(missing)
            + f"\n`{called('plan')}` works all the same",
            fix="use a kernel that has it, or ask for the right to use it",
        )


async def _problem(trial: Trial, name: str) -> str:
    try:
        await trial(name)
    except FairleadError as error:
        return str(error)
    return ""


async def _links(name: str) -> None:
    from fairlead.net.link import Rtnetlink

    with namespace.inside(name):
        netlink = Rtnetlink()
    async with netlink:
        await netlink.add_bridge("check")
        await netlink.add_veth(
            "check0", "02:00:00:00:00:01", "check1", "02:00:00:00:00:02", namespace.path(name)
        )


async def _rules(name: str) -> None:
    from fairlead.net.nftables import Nftables

    with namespace.inside(name), Nftables() as nftables:
        nftables.run(
            "add table inet check; add chain inet check nat { type nat hook prerouting priority "
            "dstnat; }"
        )


async def _forwarding(name: str) -> None:
    from fairlead.drivers.direct import DirectDriver, Sizes
    from fairlead.net.bpffs import ROOT

    pins = ROOT / "fairlead" / f"check-{os.getpid()}"
    driver = DirectDriver((), pin_path=pins, sizes=Sizes(1 << 16, connections=64, datagrams=64))
    try:
        await driver.open()
    finally:
        await driver.close(remove=True)


TRIALS: dict[str, Trial] = {
    "bridge and veth devices (the lab's cables)": _links,
    "nftables with NAT (the nodes' service proxy)": _rules,
    "eBPF and a bpffs (the gateways)": _forwarding,
}
