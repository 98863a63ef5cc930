"""One hypervisor of the cloud, with packets: OVN's controller, and Open vSwitch, which forwards in
userspace and needs no kernel module.

In: OVN's databases, a directory. Out: ports of OVN's switches and a cable to the external network,
each a device in a network namespace. The hypervisor has a namespace of its own, because two such
switches in one namespace would create the same device. Follows ovs-vswitchd.conf.db(5),
ovn-controller(8)."""

import os
from pathlib import Path

from tests.openstack import places, settings
from tests.openstack.ovn import SOUTH, Ovn
from tests.openstack.processes import Processes, RunningProcess, run

from fairlead.lab import namespace
from fairlead.net.link import Rtnetlink

NAME = "chassis"
INSIDE, OUTER = "br-int", "br-ex"
"""OVN's integration bridge, and the bridge of the external network."""
MTU = 1400
FABRIC_MAC = "02:00:00:00:ff:{:02x}"
"""No frame with this address is ever observed."""


class Chassis:
    """The hypervisor. Call `start` and `end` once each."""

    def __init__(self, ovn: Ovn, directory: Path) -> None:
        self.ovn, self.directory = ovn, directory
        self.namespace = f"flt-ovn{os.getpid()}"
        self._processes = Processes(directory)
        self._database = f"unix:{directory}/db.sock"
        self._environment = {
            f"{kind}DIR": str(directory) for kind in ("OVS_RUN", "OVS_DB", "OVS_LOG", "OVN_RUN")
        }
        self._plugged = 0

    def start(self) -> None:
        """Start the hypervisor, and return when OVN has registered it. Raise Refused if the
        programs are not installed, Unavailable if it does not start."""
        try:
            self._start()
        except BaseException:
            self.end()
            raise

    def _start(self) -> None:
        namespace.create(self.namespace)
        file = self.directory / "conf.db"
        schema = places.OVN / "usr/share/openvswitch/vswitch.ovsschema"
        run([places.program("ovsdb-tool"), "create", file, schema], self.directory)
        server = self._run("ovsdb-server", file, f"--remote=p{self._database}")
        server.await_((self.directory / "db.sock").exists)
        own = {
            "system-id": NAME,
            "ovn-remote": f"unix:{self.ovn.directory}/{SOUTH}.sock",
            "ovn-encap-type": "geneve",
            "ovn-encap-ip": "127.0.0.1",
            "ovn-bridge-datapath-type": "netdev",
            "ovn-bridge-mappings": f"{settings.OUTSIDE}:{OUTER}",
        }
        self._control(
            "--no-wait",
            "init",
            "--",
            "set",
            "open",
            ".",
            *(f"external-ids:{key}={own[key]}" for key in own),
        )
        self._run("ovs-vswitchd", self._database).lower()
        for bridge in (INSIDE, OUTER):
            self._control("add-br", bridge, "--", "set", "bridge", bridge, "datapath_type=netdev")
        controller = self._run("ovn-controller", self._database)
        controller.await_(
            lambda: [row["name"] for row in self.ovn.rows("Chassis", database=SOUTH)] == [NAME]
        )

    def end(self) -> None:
        """Stop the hypervisor and delete it from OVN."""
        self._processes.end()
        namespace.delete(self.namespace)
        self.ovn.control(SOUTH, "--if-exists", "chassis-del", NAME)

    async def plug(self, other: str, mac: str, port: str = "") -> None:
        """Create `eth0` in the namespace `other` with this MAC address: the port with this id or,
        without an id, an end of the external network."""
        self._plugged += 1
        device = f"to{self._plugged}"
        with namespace.inside(self.namespace):
            links = Rtnetlink()
        async with links:
            await links.add_veth(
                device, FABRIC_MAC.format(self._plugged), "eth0", mac, namespace.path(other), MTU
            )
            await links.set_state(device, up=True)
        # Open vSwitch forwards frames unchanged: a checksum that is left for a device to compute
        # stays wrong.
        run(("ip", "netns", "exec", other, "ethtool", "-K", "eth0", "tx", "off"), self.directory)
        named = ("--", "set", "interface", device, f"external-ids:iface-id={port}") if port else ()
        self._control("add-port", INSIDE if port else OUTER, device, *named)

    def synchronize(self) -> None:
        """Return when packets are handled according to the present northbound database."""
        self.ovn.control("nb", "--wait=hv", "sync")

    def _run(self, program: str, *arguments: str | Path) -> RunningProcess:
        inside = ("ip", "netns", "exec", self.namespace, places.program(program))
        return self._processes.start(
            program, [*inside, *arguments, "--no-chdir", "-vconsole:warn"], self._environment
        )

    def _control(self, *command: str) -> str:
        return run(
            [places.program("ovs-vsctl"), f"--db={self._database}", "--timeout=120", *command],
            self.directory,
        )
