"""Check that this machine can run a lab, by trying each requirement in a temporary namespace.

In: nothing. Out: nothing, or one Refused that names everything that is missing, its purpose, and
what works without it. A trial is more reliable than a version check, because distributions
configure, patch and lock down kernels of the same version differently.
"""

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress

from fairlead.errors import FairleadError, Refused
from fairlead.invocation import called
from fairlead.lab import namespace

Trial = Callable[[str], Awaitable[None]]


def check_root() -> None:
    """Raise Refused unless this process runs as root. Call this first: without root no other
    problem can be solved."""
    if os.geteuid() != 0:
        raise Refused(
            "a lab needs root: it creates network namespaces, loads eBPF programs and writes "
            "nftables rules",
            fix=f"run it as root; `{called('plan')}` works without root",
        )


async def check() -> None:
    """Raise Refused unless this machine can run a whole lab."""
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
            + f"\n`{called('plan')}` works without these",
            fix="use a kernel that supports these, or run with the missing privileges",
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
    from fairlead.lab.rundir import PINS

    pins = PINS / f"check-{os.getpid()}"
    driver = DirectDriver((), pin_path=pins, sizes=Sizes(1 << 16, connections=64, datagrams=64))
    try:
        await driver.open()
    finally:
        await driver.close(remove=True)
        with suppress(OSError):  # a lab has pins there
            PINS.rmdir()


TRIALS: dict[str, Trial] = {
    "bridge and veth devices (the lab's cables)": _links,
    "nftables with NAT (the nodes' service proxy)": _rules,
    "eBPF and a bpffs (the gateways)": _forwarding,
}
