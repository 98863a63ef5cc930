"""A process that can be killed, with the loop of a node and the real driver, like `fairlead node`.

In: lines on standard input. The first is the Settings; each further line is a JSON object with
Services and EndpointSlices by name, null for deleted ones. The first object contains all of them.
Out: the table `inet fairlead` of the network namespace in which the process runs."""

import asyncio
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from fairlead.drivers.nodeproxy import NodeProxyDriver
from fairlead.kube.objects import EndpointSlice, Node, ObjectKey, Service
from fairlead.model import NodeService, ServiceKey
from fairlead.plan.cluster import plan_node
from fairlead.reconcile import Loop, Pace
from fairlead.roles.node import service_precedence
from fairlead.state import State

NODE = "node"
AUDIT_S = 0.5
"""Interval of audits. The role's own interval of a minute is meant for large clusters."""


class Settings(msgspec.Struct):
    """The driver's configuration for the site."""

    node_addresses: tuple[str, ...]
    pod_cidrs: tuple[str, ...]
    service_cidrs: tuple[str, ...]

    def driver(self, state: State) -> NodeProxyDriver:
        return NodeProxyDriver(
            node_addresses=lambda: self.node_addresses,
            pod_cidrs=self.pod_cidrs,
            service_cidrs=self.service_cidrs,
            precedence_of=partial(service_precedence, state.services),
            requeue=state.subscribers.mark,
        )


def make_state() -> State:
    """Return a State that knows the node and is complete."""
    state = State(())
    state.update_nodes({ObjectKey("", NODE): msgspec.convert({"metadata": {"name": NODE}}, Node)})
    return state


def show(state: State, changed: Mapping[str, Mapping[str, Any]]) -> None:
    """Store these `services` and `slices` in the state; None deletes one."""
    services, slices = changed.get("services", {}), changed.get("slices", {})
    state.update_services(
        {
            _key(name): msgspec.convert(each, Service) if each else None
            for name, each in services.items()
        }
    )
    state.update_slices(
        {
            _key(name): msgspec.convert(each, EndpointSlice) if each else None
            for name, each in slices.items()
        }
    )


def _key(name: str) -> ObjectKey:
    return ObjectKey("default", name)


async def main() -> None:
    """Run until the process is killed, or its input ends."""
    state = make_state()
    driver = msgspec.json.decode(sys.stdin.readline(), type=Settings).driver(state)
    show(state, msgspec.json.decode(await asyncio.to_thread(sys.stdin.readline)))
    state.mark_synced("")
    await driver.open()
    loop = Loop[ServiceKey, NodeService](
        "proxy",
        state,
        partial(plan_node, state, NODE),
        [driver],
        lambda *_: None,
        pace=Pace(audit_interval_s=AUDIT_S),
    )
    tasks = [asyncio.create_task(each) for each in (loop.run(), driver.run())]
    while line := await asyncio.to_thread(sys.stdin.readline):
        show(state, msgspec.json.decode(line))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
