"""Attach programs to an interface at XDP, where the driver receives packets, and show what is
attached.

In: a loaded program, an interface's index, a path on a bpffs. Out: a BPF link, pinned at that path,
which keeps the program attached while the pin or a descriptor exists. Replacing the program is one
step in the kernel, with no packet between the two. Invariant: a program that another process
attached is never replaced or detached. Native mode (in the network driver) and generic mode (in the
kernel, for any interface) exclude each other on an interface. Follows bpf(2), BPF_LINK_CREATE and
BPF_LINK_UPDATE (Linux 5.9), and IFLA_XDP in include/uapi/linux/if_link.h."""

import errno
import os
import struct
import sys
from pathlib import Path
from typing import NamedTuple

from fairlead.errors import FairleadError, Refused
from fairlead.net.bpf import Descriptor, call, failure, open_pin
from fairlead.net.netlink import attributes
from fairlead.net.program import Program
from fairlead.net.rtnetlink import open_rtnetlink

NATIVE, GENERIC = "native", "generic"

_PROG_GET_FD_BY_ID, _LINK_CREATE, _LINK_UPDATE, _LINK_DETACH = 13, 28, 29, 34
_ATTACH_TYPE_XDP = 37
_FLAGS = {GENERIC: 1 << 1, NATIVE: 1 << 2}  # XDP_FLAGS_SKB_MODE, XDP_FLAGS_DRV_MODE
_MODES = {1: NATIVE, 2: GENERIC, 3: "offloaded", 4: "several"}  # XDP_ATTACHED_DRV and so on
_GET_LINK, _LINK = 18, struct.Struct("=BxHiII")
_XDP, _XDP_ATTACHED, _XDP_PROGRAM = 43, 2, 4


class Attached(NamedTuple):
    """The program that is attached to an interface, by this or another process."""

    mode: str
    program_id: int
    program: str
    """The name of the program; empty if it cannot be read."""

    def __str__(self) -> str:
        return f"XDP program {self.program or '(unnamed)'} (id {self.program_id}, {self.mode})"


class Link(NamedTuple):
    """A pinned link. `interface` is 0 after the interface is gone."""

    pin: Path
    interface: int
    program_id: int


async def attached(interface: int) -> Attached | None:
    """Return the program that is attached to the interface, or None. Raise Unavailable if there is
    no such interface."""
    with open_rtnetlink(f"reading the XDP program of interface {interface}") as kernel:
        (answer,) = kernel.exchange(_GET_LINK, 0, _LINK.pack(0, 0, interface, 0, 0))
    fields = dict(attributes(dict(attributes(answer, _LINK.size)).get(_XDP, b""), 0))
    mode = _MODES.get(fields.get(_XDP_ATTACHED, b"\0")[0], "")
    if not mode:
        return None
    number = int.from_bytes(fields.get(_XDP_PROGRAM, b""), sys.byteorder)
    return Attached(mode, number, _program_name(number))


def _program_name(number: int) -> str:
    try:
        with Descriptor(
            call(_PROG_GET_FD_BY_ID, struct.pack("<III", number, 0, 0)), f"XDP program {number}"
        ) as program:
            return program.information(80)[64:80].rstrip(b"\0").decode(errors="replace")
    except OSError:
        return ""


def read_link(pin: Path) -> Link | None:
    """Return the link that is pinned at `pin`; None if there is none."""
    if not pin.exists():
        return None
    with Descriptor(open_pin(pin), f"the link {pin}") as opened:
        _, _, program_id, _, interface = struct.unpack_from("<5I", opened.information(32))
    return Link(pin, interface, program_id)


async def attach(interface: int, program: Program, pin: Path, *, mode: str) -> None:
    """Attach `program` to the interface, by the link at `pin`.

    If the link already exists for this interface and mode, its program is replaced. A link for
    another interface or mode, or for an interface that is gone, is detached first. Raise Refused if
    another program is attached (the message names it), or if the interface does not support the
    mode."""
    present, link = await attached(interface), read_link(pin)
    if link and link.interface == interface and present and present.mode == mode:
        _replace(link, program)
        return
    detach(pin)
    wanted = struct.pack(
        "<4I", program.descriptor, interface, _ATTACH_TYPE_XDP, _FLAGS[mode]
    ) + bytes(32)
    try:
        made = Descriptor(call(_LINK_CREATE, wanted), f"the XDP link of interface {interface}")
    except OSError as error:
        raise _refusal(error, interface, mode, await attached(interface)) from error
    with made:
        made.pin(pin)


def _replace(link: Link, program: Program) -> None:
    with Descriptor(open_pin(link.pin), f"the link {link.pin}") as opened:
        try:
            call(_LINK_UPDATE, struct.pack("<4I", opened.descriptor, program.descriptor, 0, 0))
        except OSError as error:
            raise failure(
                error, f"replacing the XDP program of interface {link.interface}"
            ) from error


def _refusal(error: OSError, interface: int, mode: str, present: Attached | None) -> FairleadError:
    tried = f"attaching an XDP program ({mode}) to interface {interface}"
    if error.errno in (errno.EBUSY, errno.EEXIST) and present:
        return Refused(
            f"{tried}: {present} is already attached",
            fix="detach that program, or set gateway.attach to tc",
        )
    if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ERANGE, errno.ENOSPC, errno.ENOMEM):
        reasons = "its driver has no XDP, or its MTU, queues or offloads (LRO) do not allow it"
        return Refused(
            f"{tried}: {os.strerror(error.errno)}; {reasons}",
            fix="set gateway.attach to tc or xdp-generic",
        )
    return failure(error, tried)


def detach(pin: Path) -> None:
    """Detach the program from its interface and remove the link. Do nothing if there is no link."""
    if read_link(pin) is None:
        return
    with Descriptor(open_pin(pin), f"the link {pin}") as opened:
        try:
            call(_LINK_DETACH, struct.pack("<I", opened.descriptor))
        except OSError as error:
            raise failure(error, f"detaching {opened.name}") from error
    pin.unlink(missing_ok=True)
