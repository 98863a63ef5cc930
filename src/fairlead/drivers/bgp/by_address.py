"""An index of values by their addresses. Pure.

In: a tuple of values, such as the announced addresses. Out: the values with some addresses. There
may be a value for each of thousands of Services, and each Service asks for its own."""

from collections.abc import Iterable
from typing import Generic, TypeVar

from fairlead.role_state import AnnouncedAddress, RouteCheck

ValueT = TypeVar("ValueT", RouteCheck, AnnouncedAddress)


class ByAddress(Generic[ValueT]):
    """An index that is built once for each tuple of values."""

    def __init__(self) -> None:
        self._values: tuple[ValueT, ...] = ()
        self._index: dict[str, list[ValueT]] = {}

    def among(self, values: tuple[ValueT, ...], addresses: Iterable[str]) -> list[ValueT]:
        """Return the values with these addresses."""
        if values is not self._values:
            self._values, self._index = values, {}
            for each in values:
                self._index.setdefault(each.address, []).append(each)
        return [each for address in addresses for each in self._index.get(address, ())]
