"""The one effect of Nova on Neutron's ports that Octavia checks, for amphorae without machines: a
port that is plugged into a machine has the machine's id, and is deleted or freed together with the
machine. Upstream's no-op compute driver does the rest."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def plug_into_neutron() -> None:
    """Install the effect if Octavia's network driver uses Neutron."""
    from octavia.common import clients
    from octavia.compute.drivers.noop_driver import driver
    from oslo_config import cfg

    if cfg.CONF.controller_worker.network_driver == "network_noop_driver":
        return

    def network() -> Any:
        return clients.NeutronAuth.get_neutron_client().network

    def attach(
        self: Any, compute_id: str, network_id: str = "", ip_address: str = "", port_id: str = ""
    ) -> Any:
        if port_id:
            port = network().update_port(port_id, device_id=compute_id)
        else:
            fixed_ips = {"fixed_ips": [{"ip_address": ip_address}]} if ip_address else {}
            port = network().create_port(
                network_id=network_id,
                device_id=compute_id,
                device_owner="compute:nova",
                **fixed_ips,
            )
        addresses = [
            {name: each[name] for name in ("subnet_id", "ip_address")} for each in port.fixed_ips
        ]
        return SimpleNamespace(
            port_id=port.id, net_id=port.network_id, fixed_ips=addresses
        )  # as novaclient has it

    def detach(self: Any, compute_id: str, port_id: str) -> None:
        network().update_port(port_id, device_id="")

    def delete(machine: Callable[..., None]) -> Callable[..., None]:
        def deleted(self: Any, compute_id: str) -> None:
            machine(self, compute_id)
            for port in network().ports(device_id=compute_id):
                if port.device_owner == "compute:nova":
                    network().delete_port(port)
                else:
                    network().update_port(port, device_id="")

        return deleted

    driver.NoopComputeDriver.attach_network_or_port = attach
    driver.NoopComputeDriver.detach_port = detach
    driver.NoopComputeDriver.delete = delete(driver.NoopComputeDriver.delete)
