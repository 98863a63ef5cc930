"""One hypervisor of OVN: ovsdb-server, ovs-vswitchd and ovn-controller in a network namespace.

In: OVN's databases, a directory, devices. Out: ports of OVN's switches, each a device in another
namespace, and an uplink for tunnels and one for the external network. Each hypervisor has a
namespace of its own, because two userspace switches in one namespace would create the same device.
Follows ovs-vswitchd.conf.db(5), ovn-controller(8)."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from fairlead.errors import Conflict
from fairlead.lab import namespace, process
from fairlead.lab.ovn.central import TIMEOUT_S, Central, accepts
from fairlead.lab.ovn.layout import PHYSICAL_NETWORK
from fairlead.lab.ovn.programs import program, schema
from fairlead.net.link import Rtnetlink

TUNNEL_BRIDGE, EXTERNAL_BRIDGE, INTEGRATION_BRIDGE = "br-phy", "br-ex", "br-int"
PROGRAMS = ("ovsdb-server", "ovs-vswitchd", "ovn-controller")
"""The programs of a hypervisor, in the order of their start."""
MTU = 1400
"""The MTU of ports, which leaves room for the header of a tunnel."""


class Chassis:
    """The hypervisor `name` with the tunnel address `tunnel_address`."""

    def __init__(self, central: Central, name: str, inside: str, tunnel_address: str) -> None:
        self.name, self.inside, self.tunnel_address = name, inside, tunnel_address
        self._central = central
        self._directory = central.directory.parent / name
        self._database = f"unix:{self._directory}/db.sock"
        self._plugged = 0

    async def start(self, tunnel_uplink: str, external_uplink: str) -> None:
        """Start the hypervisor with these devices of its namespace as uplinks, and return when OVN
        has registered it. If both are the same device, tunnels end at the bridge of the external
        network. On a hypervisor that has run before, start the programs that have ended."""
        self._directory.mkdir(parents=True, exist_ok=True)
        file = self._directory / "conf.db"
        if not file.exists():
            await self._central.run(
                (str(program("ovsdb-tool")), "create", str(file), str(schema("vswitch.ovsschema")))
            )
        server = self._running("ovsdb-server", str(file), f"--remote=p{self._database}")
        is_ready = partial(accepts, self._directory / "db.sock")
        await process.await_ready(server, is_ready, log=self._log("ovsdb-server"))
        await self.control("--no-wait", "init", "--", "set", "open", ".", *self._settings())
        switch = self._running("ovs-vswitchd", self._database)
        of_tunnels = EXTERNAL_BRIDGE if tunnel_uplink == external_uplink else TUNNEL_BRIDGE
        uplinks = {of_tunnels: tunnel_uplink, EXTERNAL_BRIDGE: external_uplink}
        bridges = []
        for bridge in (INTEGRATION_BRIDGE, *uplinks):
            bridges += ["--", "--may-exist", "add-br", bridge, "--", "set", "bridge", bridge]
            bridges += ["datapath_type=netdev"]
        for bridge, uplink in uplinks.items():
            bridges += ["--", "--may-exist", "add-port", bridge, uplink]
        await self.control(*bridges[1:])
        with namespace.inside(self.inside):
            links = Rtnetlink()
        async with links:

            async def has_bridges() -> bool:
                return uplinks.keys() <= (await links.links()).keys()

            # ovs-vsctl waits for Open vSwitch only if it has changed the database.
            await process.await_ready(switch, has_bridges, log=self._log("ovs-vswitchd"))
            await links.set_address(of_tunnels, f"{self.tunnel_address}/24")
            for bridge in uplinks:
                await links.set_state(bridge, up=True)
        controller = self._running("ovn-controller", self._database)
        await process.await_ready(controller, self._registered, log=self._log("ovn-controller"))

    async def plug(self, other: str, device_mac: str, mac: str, port: str) -> None:
        """Create `eth0` in the namespace `other` with the MAC address `mac`, as the port of OVN
        with this name. `device_mac`: the MAC address of its other end, on the hypervisor."""
        self._plugged += 1
        device = f"port{self._plugged}"
        with namespace.inside(self.inside):
            links = Rtnetlink()
        async with links:
            await links.add_veth(device, device_mac, "eth0", mac, namespace.path(other), MTU)
            await links.set_state(device, up=True)
        await without_offload(self._central, other, "eth0")
        named = ("--", "set", "interface", device, f"external-ids:iface-id={port}")
        await self.control("add-port", INTEGRATION_BRIDGE, device, *named)

    async def control(self, *command: str) -> str:
        """Return the output of ovs-vsctl(8)."""
        tool = (str(program("ovs-vsctl")), f"--db={self._database}", f"--timeout={TIMEOUT_S}")
        return await self._central.run((*tool, *command))

    def processes(self) -> Sequence[process.Process]:
        """Return the running processes of the hypervisor."""
        return process.find(self._central.lab, f"{self.name}/")

    async def _registered(self) -> bool:
        rows = await self._central.rows("Chassis", "sb")
        return any(row["name"] == self.name for row in rows)

    def _settings(self) -> Sequence[str]:
        own = {
            "system-id": self.name,
            "hostname": self.name,
            "ovn-remote": self._central.remote("sb"),
            "ovn-encap-type": "geneve",
            "ovn-encap-ip": self.tunnel_address,
            "ovn-bridge-datapath-type": "netdev",
            "ovn-monitor-all": "true",
            "ovn-bridge-mappings": f"{PHYSICAL_NETWORK}:{EXTERNAL_BRIDGE}",
        }
        return [f"external-ids:{key}={text}" for key, text in own.items()]

    def _running(self, name: str, *arguments: str) -> process.Process:
        """Return the running program. Start it if it does not run."""
        label = f"{self.name}/{name}"
        with suppress(Conflict):
            return process.one(self._central.lab, label)
        folders = [f"{kind}DIR={self._directory}" for kind in ("OVS_RUN", "OVS_DB", "OVS_LOG")]
        environment = ("env", *folders, f"OVN_RUNDIR={self._directory}")
        return process.spawn(
            self._central.lab,
            label,
            (*environment, str(program(name)), *arguments, "--no-chdir", "-vconsole:warn"),
            log=self._log(name),
            inside=self.inside,
        )

    def _log(self, name: str) -> Path:
        return self._central.log(self.name, name, self._directory)


async def without_offload(central: Central, inside: str, device: str) -> None:
    """Make the device compute checksums itself. Open vSwitch forwards frames unchanged, so a
    checksum that is left for a network card to compute stays wrong."""
    off = [word for name in ("tx", "rx", "tso", "gso", "gro") for word in (name, "off")]
    await process.run(inside, ("ethtool", "-K", device, *off), lab=central.lab)
