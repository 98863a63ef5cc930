"""A cloud with one tenant: Octavia with both providers over Neutron over OVN, and a network with
nodes.

In: a directory. Out: the URLs of both APIs, which need no token; OVN's rows; the tenant's network
behind a router to the external network, with ports for its nodes. There are no hypervisors: no
packets flow, and members are not probed."""

from pathlib import Path

from openstack.connection import Connection
from tests.openstack import clients, places, settings
from tests.openstack.octavia import Octavia
from tests.openstack.ovn import Ovn
from tests.openstack.processes import Processes
from tests.openstack.servers.ready import READY

from fairlead.lab.ports import free_port

EXTERNAL, TENANT = "203.0.113.0/24", "10.1.0.0/24"
NODES = {f"node{number}": f"10.1.0.{10 + number}" for number in (1, 2, 3)}
PROJECT = "11111111111111111111111111111111"


class Cloud:
    """The cloud. Call `start` and `end` once each."""

    def __init__(self, directory: Path) -> None:
        self.octavia = Octavia(_made(directory / "octavia"))
        self.ovn = Ovn(_made(directory / "ovn"))
        self.directory = _made(directory / "neutron")
        self.port = free_port()
        self.neutron = f"http://127.0.0.1:{self.port}"
        self._processes = Processes(self.directory)
        self.external_network = self.external_subnet = self.network = self.subnet = self.router = ""
        """Their ids."""
        self.nodes: dict[str, str] = {}
        """The port of each node, by its name. The nodes' addresses are in `NODES`."""

    def start(self) -> None:
        """Start the cloud, and return when all services answer. Raise Refused if it is not
        installed, Unavailable if it does not start."""
        try:
            self._start()
            self._make_network(self.client())
        except BaseException:
            self.end()
            raise

    def _start(self) -> None:
        self.ovn.start()
        octavia = self.octavia
        addresses = (self.ovn.north, self.ovn.south)
        octavia.prepare(settings.octavia_with_neutron(octavia.directory, self.neutron, *addresses))
        conf = self.directory / "neutron.conf"
        environment = places.ENVIRONMENT
        conf.write_text(
            settings.text(
                settings.neutron(
                    self.directory, environment, octavia.database.url("neutron"), *addresses
                )
            )
        )
        neutron = self._processes.python("neutron", conf, str(self.port))
        agent = self._processes.python("driver_agent", octavia.conf)
        # Provider `ovn` looks for the agent when Octavia loads it.
        agent.await_(
            lambda: all((octavia.directory / f"{name}.sock").exists() for name in ("status", "get"))
        )
        octavia.serve().await_line(READY)
        neutron.await_line(READY)

    def end(self) -> None:
        self.octavia.end()
        self._processes.end()
        self.ovn.end()

    def client(self) -> Connection:
        """Return a client that calls both APIs directly."""
        return clients.without_auth(octavia=self.octavia.url, neutron=self.neutron)

    def _make_network(self, client: Connection) -> None:
        network, own = client.network, {"project_id": PROJECT}
        external = network.create_network(
            name="external",
            is_router_external=True,
            provider_network_type="flat",
            provider_physical_network=settings.OUTSIDE,
            **own,
        )
        self.external_network = external.id
        self.external_subnet = network.create_subnet(
            name="external",
            network_id=external.id,
            ip_version=4,
            cidr=EXTERNAL,
            is_dhcp_enabled=False,
            **own,
        ).id
        self.network = network.create_network(name="nodes", **own).id
        self.subnet = network.create_subnet(
            name="nodes", network_id=self.network, ip_version=4, cidr=TENANT, **own
        ).id
        router = network.create_router(
            name="router", external_gateway_info={"network_id": external.id}, **own
        )
        network.add_interface_to_router(router, self.subnet)
        self.router = router.id
        for name, address in NODES.items():
            where = [{"subnet_id": self.subnet, "ip_address": address}]
            self.nodes[name] = network.create_port(
                name=name, network_id=self.network, fixed_ips=where, **own
            ).id


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
