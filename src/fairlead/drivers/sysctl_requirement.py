"""A requirement of a driver on a kernel setting of its host. A pure value; `drivers.host` checks
it."""

from collections.abc import Callable
from typing import NamedTuple


class SysctlRequirement(NamedTuple):
    """The name of a setting (see `net.sysctl`), a predicate for harmful values, the value that the
    setting should have, and the reason."""

    setting: str
    harmful: Callable[[str], bool]
    recommended: str
    why: str
