"""The messages between a role and its announcing process, sent in frames (`net/frames`). Pure.

`driver` is the role's side, `process` the other one."""

from typing import Literal

import msgspec

from fairlead.drivers.l2.ownership import Standing
from fairlead.drivers.l2.records import Place


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of the messages."""


class Settings(Message, frozen=True, tag=True):
    """The first message to the process. `directory`: of the pinned maps. `group`: of
    `records.group_of`. `ready`: a previous process had presented this host as ready."""

    name: str
    group: bytes
    directory: str
    interval_s: float
    multiplier: int
    stale_s: float
    ready: bool


class Interface(Message, frozen=True):
    """An interface where addresses are announced."""

    index: int
    name: str


class Wanted(Message, frozen=True):
    """An address to announce; see `engine.Want`."""

    place: Place
    candidates: tuple[str, ...] | None
    leaving: bool


class Configure(Message, frozen=True, tag=True):
    """Use exactly these interfaces, add or change the addresses `wanted`, and remove those in
    `gone`. `ready`: this host serves. `leaving`: it hands over its addresses."""

    sequence: int
    interfaces: tuple[Interface, ...]
    wanted: tuple[Wanted, ...]
    gone: tuple[Place, ...]
    ready: bool
    leaving: bool


Request = Settings | Configure


class PlaceStatus(Message, frozen=True):
    """The state of one address on an interface. `holder`: its owner, if known. `cause`: why this
    host has taken it; `taken`: this process has taken it. `foreign`: the MAC address of a station
    outside of Fairlead that uses it."""

    place: Place
    phase: Literal["learning", "silent", "owned", "conflict", "down", "gone"]
    holder: str
    cause: str
    taken: bool
    foreign: str


class MemberStatus(Message, frozen=True):
    """Another announcer on an interface. `standing`: None: it does not answer."""

    interface: int
    name: str
    mac: str
    standing: Standing | None


class Report(Message, frozen=True):
    """A report of the process. `sequence`: of the last request that it has carried out. `places`:
    the places that have changed. `members`: all members, if any has changed. `announcements`: the
    number of frames sent so far. `takes`: how often this process took an address that another
    member had before."""

    sequence: int
    places: tuple[PlaceStatus, ...]
    members: tuple[MemberStatus, ...] | None
    announcements: int
    takes: int
    unfiltered: int
    """The number of multicast memberships that are not reported to switches."""
