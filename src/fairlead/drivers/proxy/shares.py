"""The shares of namespaces and Services in the connections of a HAProxy worker. Pure.

In: the limit of open files, the share of a namespace, the number of listeners. Out: lines of
HAProxy's configuration. HAProxy counts the connections of each Service and each namespace in a
table of its own (conn_cur), and closes a new one that exceeds a share, so a share holds at every
moment, without this process, and however many listeners a Service has.

With the share s, w = (1 - s) / s, and the room for all connections, a new connection must leave

    w * (those of its Service) + w * (those of its namespace) + (all) <= room

So a namespace may have s of what other namespaces leave, as of the resources of class direct, and a
Service less than its namespace. Invariant: whatever one namespace requests, there is room for the
connections of another one."""

from fractions import Fraction
from typing import NamedTuple

from fairlead.model import ServiceKey

RESERVE = 8
"""One part in RESERVE of the connections is not used: HAProxy needs descriptors for itself."""
TABLE = "fairlead-shares"
ALL = "*"
"""The key of all connections in the table. It is the name of no namespace."""
_ROOM = "proc.room"
_RULE = "tcp-request session"


class Shares(NamedTuple):
    """`files`: the limit of open files of HAProxy. `share`: the fraction that a namespace may have
    of what others leave; 1: there are no shares."""

    files: int = 0
    share: float = 1.0

    def room(self, listeners: int) -> int:
        """Return the number of connections of all Services. Each has two descriptors, and each
        listener one."""
        connections = max(0, self.files - listeners) // 2
        return connections - connections // RESERVE

    def largest(self, listeners: int) -> int:
        """Return how many connections a Service may have at most, if there are no others."""
        return int(self.room(listeners) / (1 + 2 * self._weight))

    def global_lines(self, listeners: int) -> list[str]:
        """Return the lines of the section `global`."""
        return [f"set-var {_ROOM} int({self.room(listeners)})"] * self.limited

    def table_lines(self) -> list[str]:
        """Return the section with the table. Unused entries are replaced when it is full."""
        lines = [f"backend {TABLE}", "    stick-table type string len 128 size 200k store conn_cur"]
        return [*lines, ""] * self.limited

    def rule_lines(self, service: ServiceKey) -> list[str]:
        """Return the lines of a section of this Service."""
        keys = (ALL, service.namespace, str(service))
        return [
            *(f"{_RULE} track-sc{at} str({key}) table {TABLE}" for at, key in enumerate(keys)),
            f"{_RULE} set-var(sess.all) sc0_conn_cur,sub({_ROOM})",
            f"{_RULE} set-var(sess.namespace) sc1_conn_cur,{self._times},add(sess.all)",
            f"{_RULE} reject if {{ sc2_conn_cur,{self._times},add(sess.namespace) gt 0 }}",
        ] * self.limited

    def are_in(self, text: str) -> bool:
        """Whether a configuration was rendered with these shares."""
        if not self.limited:
            return f"table {TABLE}" not in text
        lines = [*self.global_lines(text.count("\nlisten ")), f"sc1_conn_cur,{self._times},add"]
        return all(each in text for each in lines)

    @property
    def _times(self) -> str:
        """The converters that multiply by the weight."""
        return f"mul({self._weight.numerator}),div({self._weight.denominator})"

    @property
    def limited(self) -> bool:
        """Whether there are shares."""
        return self.share < 1

    @property
    def _weight(self) -> Fraction:
        share = Fraction(self.share).limit_denominator(1000)
        return (1 - share) / share if share else Fraction(1000)


NO_SHARES = Shares()
