"""The change of the method by which an address is announced: the former method announces the
address until the new one does.

In: the addresses that wait for the new method. Out: the outcome of their Service. The drivers of
both methods decide when the wait is over, by `AnnouncedElsewhere`."""

from collections.abc import Callable, Sequence

from fairlead.model import Outcome

CHECK_S = 0.5
"""The interval at which a Service is reconciled while one of its addresses changes its method."""

AnnouncedElsewhere = Callable[[str], bool]
"""Returns whether this host knows that an address is announced by the other method."""


def waiting(addresses: Sequence[str], former: str, new: str) -> Outcome:
    """Return the outcome of a Service with these addresses. `former`, `new`: the methods, in
    words."""
    return Outcome(
        "waiting",
        f"{', '.join(addresses)}: announced by {former} until a host announces it by {new}",
        again_s=CHECK_S,
        in_part=True,
        coarse=True,
    )
