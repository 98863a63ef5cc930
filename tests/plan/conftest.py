"""Fixtures that create the objects of small clusters."""

from collections.abc import Callable

import pytest
from tests import makers

from fairlead.kube.objects import EndpointSlice, Node, NodeAddress, NodeStatus, ObjectMeta, Service


@pytest.fixture
def make_service() -> Callable[..., Service]:
    return makers.make_service


@pytest.fixture
def make_slice() -> Callable[..., EndpointSlice]:
    return makers.make_slice


@pytest.fixture
def nodes() -> dict[str, Node]:
    return {
        name: Node(
            ObjectMeta(name=name),
            status=NodeStatus(
                (
                    NodeAddress("InternalIP", f"192.0.2.{20 + i}"),
                    NodeAddress("InternalIP", f"2001:db8:1::{i}"),
                )
            ),
        )
        for i, name in enumerate(("node1", "node2", "node3", "node4"), start=1)
    }
