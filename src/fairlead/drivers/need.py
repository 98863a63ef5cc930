"""What a driver needs of its host's kernel: a setting, and the values of it that do harm. A pure
value; `drivers.host` looks whether it is met."""

from collections.abc import Callable
from typing import NamedTuple


class Need(NamedTuple):
    """A setting's name (see `net.sysctl`), whether a value of it does harm, the value that does
    not, and why."""

    setting: str
    harmful: Callable[[str], bool]
    should: str
    why: str
