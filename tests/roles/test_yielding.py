"""When a gateway knows which other gateways can take its addresses over."""

import pytest

from fairlead.kube.objects import Node, NodeAddress, NodeSpec, NodeStatus, ObjectKey, ObjectMeta
from fairlead.role_state import PeersState, PeerState
from fairlead.roles.yielding import Yielding
from fairlead.state import State


class Others:
    """The exchange with one other gateway."""

    def __init__(self, *, connected: bool) -> None:
        self._connected = connected

    def status(self) -> PeersState:
        return PeersState((PeerState("192.0.2.2:9445", self._connected),))


@pytest.mark.parametrize(
    ("others", "cordoned", "takers"),
    [
        (None, True, None),
        (Others(connected=True), True, {"other"}),
        (Others(connected=False), True, set()),
        (Others(connected=True), False, None),
    ],
)
def test_a_cordoned_gateway_knows_the_gateways_that_it_is_connected_with(
    others: Others | None, *, cordoned: bool, takers: set[str] | None
) -> None:
    state = State(())
    yielding = Yielding(state, "own", others)
    nodes = {
        ObjectKey("", name): Node(
            ObjectMeta(name),
            NodeSpec(unschedulable=cordoned and name == "own"),
            NodeStatus((NodeAddress("InternalIP", address),)),
        )
        for name, address in (("own", "192.0.2.1"), ("other", "192.0.2.2"))
    }
    yielding.update_nodes(nodes)
    assert (state.yields, state.takers) == (False, takers)
