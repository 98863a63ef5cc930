"""The OVN of a lab, whose routers have the place that gateways have otherwise.

    client ── router ── lan ─┬─ node1 ... (default router: OVN's router)
                             └─ chassis1 ... (OVN's router has its port on one of them)

In: a lab whose hosts are connected. Out: OVN's databases and programs, and its routers, each with
one port, in lan (routers.py). The lab's router sends them the packets for VIPs, they send them to
pods by the nodes or to node ports, and the replies return through them. With one router in front of
all nodes, every chassis can have its port: it moves to another one if BFD reports that its chassis
is dead. With a gateway router for each node, that of node1 is on chassis1, and so on. Tunnels
between chassis, which carry BFD alone, end in lan too, as with one network card. Invariant: all
files are in the run directory, and all processes have the marks of the lab, so `fairlead lab down`
removes them as any others."""

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from itertools import chain

from fairlead.errors import Refused, Unavailable
from fairlead.lab import namespace, process
from fairlead.lab.ovn.central import Central, Database
from fairlead.lab.ovn.chassis import PROGRAMS, Chassis, without_offload
from fairlead.lab.ovn.programs import program
from fairlead.lab.ovn.routers import commands, routers_of
from fairlead.lab.rundir import RunDirectory, Size
from fairlead.lab.topology import (
    CONTROL,
    LAN,
    NETWORKS,
    ROUTER,
    Host,
    Topology,
)

DRAIN_ADDRESS = "192.0.0.8"
"""An address to which nothing is routed (RFC 7600, IPv4 dummy address)."""
TIMEOUT_S = 60.0
POLL_S = 0.02
DISCARD = 9
"""A port on which no host listens."""

Progress = Callable[[str], None]


def check(size: Size) -> None:
    """Raise Refused if a lab of this size has no OVN and needs it, or has something beside OVN that
    would not work. Pure."""
    if size.ovn is None:
        if size.default_class == "ovn":
            raise Refused(
                "class ovn needs OVN in front of the nodes",
                fix="add --ovn router or --ovn gateways",
            )
        return
    if size.ovn.topology == "gateways" and size.ovn.backends != "pods":
        raise Refused(
            "the gateway router of a node sends to the pods of its node, not to node ports",
            fix="leave out --ovn-backends, or choose --ovn router",
        )
    if size.gateways or size.gateways_on_nodes:
        raise Refused(
            "in a lab with --ovn, OVN's routers have the place of the gateways",
            fix="leave out --gateways and --gateways-on-nodes",
        )
    if size.announce != "none":
        raise Refused(
            "in a lab with --ovn no host announces addresses: they have routes to OVN's routers",
            fix="leave out --announce",
        )
    if size.far_nodes or size.lan_clients:
        raise Refused(
            "replies to hosts in the network of the nodes, and replies of far nodes, would not "
            "return through OVN's routers, which must translate them",
            fix="leave out --far-nodes and --lan-clients",
        )


def remote(directory: RunDirectory, database: Database) -> str:
    """Return the address of a database."""
    return f"unix:{directory.ovn}/central/{database}.sock"


def central(topology: Topology) -> Central:
    """Return the databases and northd, which run in the namespace of the lab's router."""
    directory = RunDirectory(topology.lab)
    inside = topology.namespace(ROUTER)
    return Central(topology.lab, directory.ovn / "central", inside, directory.logs)


async def start(topology: Topology, progress: Progress) -> None:
    """Start OVN, and return when its routers forward packets of every node."""
    progress("OVN: databases and northd")
    made = central(topology)
    await made.start()
    _add_tools(topology)
    chassis = topology.of("chassis")
    progress(f"OVN: {len(chassis)} chassis")
    await asyncio.gather(*(start_chassis(topology, host) for host in chassis))
    await made.control("nb", *chain.from_iterable(("--", *each) for each in commands(topology)))
    progress("OVN: waiting until its routers forward packets")
    await made.synchronize()
    await _await_routers(topology, made)


async def start_chassis(topology: Topology, host: Host) -> None:
    """Start the programs of a chassis that do not run."""
    (port,) = host.ports
    made = central(topology)
    for inside, device in ((ROUTER, port.switch_port), (host.name, port.device)):
        await without_offload(made, topology.namespace(inside), device)
    chassis = Chassis(made, host.name, topology.namespace(host.name), host.addresses[0])
    await chassis.start(port.device, port.device)


def dead_programs(topology: Topology, host: Host) -> Sequence[str]:
    """Return the programs that should run on a chassis and do not."""
    running = {each.label for each in process.find(topology.lab, f"{host.name}/") if each.leads}
    return [name for name in PROGRAMS if f"{host.name}/{name}" not in running]


def _add_tools(topology: Topology) -> None:
    """Let the tools of OVN on a host reach its databases, and those of Open vSwitch on a chassis
    the database of the chassis."""
    directory = RunDirectory(topology.lab)
    for host in (ROUTER, CONTROL):
        for database in ("nb", "sb"):
            name = f"ovn-{database}ctl"
            directory.add_tool(
                host, name, (str(program(name)), f"--db={remote(directory, database)}")
            )
    for chassis in topology.of("chassis"):
        database = f"unix:{directory.ovn / chassis.name}/db.sock"
        directory.add_tool(
            chassis.name, "ovs-vsctl", (str(program("ovs-vsctl")), f"--db={database}")
        )


async def _await_routers(topology: Topology, made: Central) -> None:
    """Wait until the router of each node forwards packets of the node to the lab's router, and
    knows the MAC addresses of both: OVN asks for an address when it has the first packet for it,
    and learns that of each host that asks for the router's."""
    gateways = {str(network[1]) for network in LAN}
    neighbors = {
        (router.port, address)
        for router in routers_of(topology)
        for node in router.nodes
        for address in {*node.addresses, *gateways}
    }

    async def is_ready() -> bool:
        for node in topology.of("node"):
            for network in NETWORKS["wan"]:
                if not await answers(topology.namespace(node.name), str(network[1]), DISCARD):
                    return False
        rows = await made.rows("MAC_Binding", "sb")
        return neighbors <= {(row["logical_port"], row["ip"]) for row in rows}

    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not await is_ready():
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise Unavailable(
            f"OVN did not forward the packets of all nodes within {TIMEOUT_S:g} s"
        ) from error
    await made.synchronize()


async def answers(inside: str, address: str, port: int) -> bool:
    """Return whether the address answers a TCP connection from this namespace within a second, by
    accepting or by refusing it."""
    family = socket.AF_INET if ip_address(address).version == 4 else socket.AF_INET6
    with namespace.make_socket(inside, family) as connection:
        connection.setblocking(False)
        try:
            async with asyncio.timeout(1):
                await asyncio.get_running_loop().sock_connect(connection, (address, port))
        except OSError as error:  # TimeoutError too, without a number
            return error.errno == errno.ECONNREFUSED
    return True
