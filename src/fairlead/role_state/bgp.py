"""The part of `/state` about the announcement of addresses by BGP, and its table. Pure."""

from collections.abc import Iterator

from fairlead.model import Value
from fairlead.role_state.part import Part, Table


class BgpSessionState(Value, frozen=True):
    """A session with a router. `state`: that of BGP, such as `Established`, or `unknown`. `bfd`: as
    BIRD prints it, such as `Up`; empty: without BFD. `announced`: the number of routes that the
    router has been sent. `last_error`: in BIRD's words."""

    router: str
    address: str
    asn: int
    state: str
    bfd: str = ""
    announced: int = 0
    last_error: str = ""


class BgpState(Part, frozen=True):
    """`addresses`: the number of addresses that this gateway announces."""

    addresses: int = 0
    sessions: tuple[BgpSessionState, ...] = ()

    def shown(self) -> Iterator[Table | str]:
        yield Table(
            ("ROUTER", "ADDRESS", "AS", "SESSION", "BFD", "ANNOUNCED", "LAST ERROR"),
            [
                (
                    each.router,
                    each.address,
                    str(each.asn),
                    each.state,
                    each.bfd or "-",
                    str(each.announced),
                    each.last_error or "-",
                )
                for each in self.sessions
            ],
        )
        yield f"announces by BGP: {self.addresses}"
