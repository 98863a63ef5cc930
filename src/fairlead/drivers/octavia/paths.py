"""Paths of requests to the APIs of Octavia and Neutron.

In: a path below /lbaas, or a path of Neutron after `network/`. Out: its URL below the endpoint.
Pure."""

from fairlead.drivers.octavia.balancers import FloatingIp

NETWORK = "network/"
"""The prefix of paths of Neutron."""
VERSIONS = "versions"
"""The path of the list of versions of Octavia's API."""
MONITORS = "healthmonitors"
FLOATING_IPS = f"{NETWORK}floatingips"
GROUPS = f"{NETWORK}security-groups"
RULES = f"{NETWORK}security-group-rules"
PORTS = f"{NETWORK}ports"
SUBNETS = f"{NETWORK}subnets"


def url_of(path: str) -> str:
    return f"/{path.removeprefix(NETWORK)}" if path.startswith(NETWORK) else f"/lbaas/{path}"


def path_of(floating: FloatingIp) -> str:
    return f"{FLOATING_IPS}/{floating.id}"
