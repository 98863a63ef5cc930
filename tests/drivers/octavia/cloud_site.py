"""A Site at a cloud with both providers, Neutron and OVN."""

from pathlib import Path
from typing import Any

from openstack.connection import Connection
from tests.drivers.octavia.site import Site, settings
from tests.openstack import clients
from tests.openstack.cloud import Cloud
from tests.openstack.fault_proxy import FaultProxy
from tests.openstack.fixtures import FaultProxies

from fairlead.kube.events import Recorder
from fairlead.model import FloatingIpRequest, OctaviaPlace, OctaviaSettings

Fields = dict[str, Any]


class CloudSite(Site):
    """A Site whose load balancers are on the nodes' subnet."""

    def __init__(
        self, cloud_proxies: FaultProxies, cloud: Cloud, folder: Path, recorder: Recorder
    ) -> None:
        super().__init__(cloud_proxies.octavia, folder, recorder, cloud_proxies.neutron)
        self.neutron: FaultProxy = cloud_proxies.neutron
        self.openstack = cloud
        self.client: Connection = cloud.client()
        """A client whose calls are not counted."""

    def settings(self, provider: str = "ovn", **fields: object) -> OctaviaSettings:
        monitor_types = (("TCP", "TCP" if provider == "ovn" else "HTTP"),)
        method = "SOURCE_IP_PORT" if provider == "ovn" else "ROUND_ROBIN"
        given: Fields = {
            "provider": provider,
            "place": OctaviaPlace(self.openstack.subnet),
            "monitor_types": monitor_types,
            "method": method,
        }
        return settings(**given | fields)

    def with_floating_ip(self, provider: str = "ovn", **request: Any) -> OctaviaSettings:
        """Return settings with a floating IP."""
        return self.settings(
            provider,
            floating=FloatingIpRequest(
                **{"network_id": self.openstack.external_network, **request}
            ),
        )

    def create_floating_ip(self, **fields: object) -> Any:
        """Create another user's floating IP in the same project."""
        client = clients.without_auth(neutron=self.neutron.url)
        return client.network.create_ip(
            floating_network_id=self.openstack.external_network, **fields
        )

    @property
    def floating(self) -> list[Any]:
        """Return the floating IPs of the project."""
        return list(self.client.network.ips(project_id=self.proxy.project))
