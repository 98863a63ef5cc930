"""Carry changes out on the tables, one Service's failure apart from another's.

In: changes, and for each node that is to be set its next hop, or why there is none. Out: the outcomes of the Services that did
not get all they should have.
Invariant: no node gets a share of a listener without a usable next hop of its family, unless no other has one either. So what
one node cannot take goes to the others, and `diff` asks again for as long as that is so.
"""

from collections.abc import Mapping, Sequence

from fairlead.drivers.direct.next_hop import NextHop
from fairlead.drivers.direct.spec import DirectChange, RemoveListener, SetListener, SetNode, without
from fairlead.drivers.direct.tables import Tables
from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.model import Outcome, ServiceKey
from fairlead.net.transition import Slots

_Failures = dict[tuple[str, bool], FairleadError]
"""Why a node cannot be reached; over IPv6 if True."""


def carry_out(
    tables: Tables, changes: Sequence[DirectChange], next_hops: Mapping[SetNode, NextHop | FairleadError]
) -> dict[ServiceKey, Outcome]:
    """Do all that can be done, in order. Nothing is raised: what goes wrong goes wrong for one Service."""
    failures: _Failures = {}
    reasons: dict[ServiceKey, list[FairleadError]] = {}
    for change in changes:
        try:
            match change:
                case SetNode():
                    errors = _set_node(tables, change, next_hops[change], failures)
                case SetListener():
                    errors = _set_listener(tables, change, failures)
                case RemoveListener(service=service, key=key):
                    errors = []
                    tables.remove_listener(key, service)
        except FairleadError as error:
            errors = [error]
        if errors:
            reasons.setdefault(change.service, []).extend(errors)
    tables.forget_unused_nodes()
    return {service: _outcome(errors) for service, errors in reasons.items()}


def _set_node(tables: Tables, change: SetNode, hop: NextHop | FairleadError, failures: _Failures) -> list[FairleadError]:
    if isinstance(hop, FairleadError):
        ipv6 = ":" in change.address
        tables.nodes.doubt(change.node, ipv6=ipv6)
        failures[change.node, ipv6] = hop
        return [hop]
    tables.nodes.set_address(change.node, change.address, hop)
    return []


def _set_listener(tables: Tables, change: SetListener, failures: _Failures) -> list[FairleadError]:
    """Why nodes had to be left out."""
    ipv6 = ":" in change.listener.key.address
    nodes = {node for node, _ in change.listener.weights}.intersection(change.slots.nodes)
    unreachable = sorted(node for node in nodes if not tables.nodes.reachable(node, ipv6=ipv6))
    if unreachable:
        old = tables.installed(change.listener.key)
        change = without(change, frozenset(unreachable), old.slots if old else Slots())
    tables.set_listener(change)
    return [failures.get((node, ipv6)) or _unknown(node) for node in unreachable]


def _unknown(node: str) -> Unavailable:
    return Unavailable(f"no next hop is known for node {node}", fix="it is asked for again; check the gateway's routes")


def _outcome(errors: Sequence[FairleadError]) -> Outcome:
    """Trying again may help as long as one of them is not the user's to mend."""
    refused = all(isinstance(error, Refused) for error in errors)
    message = "; ".join(dict.fromkeys(str(error) for error in errors))
    retry_after_s = max(error.retry_after_s if isinstance(error, Unavailable) else 0.0 for error in errors)
    return Outcome("refused" if refused else "unavailable", message, again_s=retry_after_s)
