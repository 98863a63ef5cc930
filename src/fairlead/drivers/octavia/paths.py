"""Paths of requests to Octavia's API and to Neutron's.

In: a path below /lbaas, or one of Neutron's after `network/`. Out: its URL below the endpoint.
Pure."""

from fairlead.drivers.octavia.balancers import FloatingIp

NETWORK = "network/"
"""How paths of Neutron's begin."""
VERSIONS = "versions"
"""The path of what Octavia's API says of itself."""
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
