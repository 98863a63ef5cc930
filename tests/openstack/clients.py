"""Clients of the real OpenStack, by openstacksdk, with which tests create, read and delete
objects."""

import time
from collections.abc import Callable
from typing import Any

import openstack
from openstack.connection import Connection
from openstack.exceptions import ConflictException, NotFoundException

FIRST_POLL_S, LAST_POLL_S = 0.05, 0.4
"""The first and the last interval between polls. A poll costs Octavia a tenth of the work that is
waited for."""
TIMEOUT_S = 300.0
AGENT = "tests"
"""The User-Agent of calls of the test itself."""


def without_auth(*, octavia: str = "", neutron: str = "") -> Connection:
    """Return a client of services without authentication, by their URLs."""
    settings: dict[str, Any] = {
        "auth_type": "none",
        "auth": {"endpoint": octavia or neutron},
        "load_balancer_api_version": "2",
    }
    if octavia:
        settings["load_balancer_endpoint_override"] = octavia
    if neutron:
        settings["network_endpoint_override"] = neutron
    client = openstack.connect(
        region_name="R", app_name=AGENT, load_envvars=False, load_yaml_config=False, **settings
    )
    _ = client.session  # a session that exists closes its connections when it is collected
    return client


def wait_settled(client: Connection, balancer: str) -> str:
    """Wait until Octavia has finished its work on the load balancer, or the load balancer is in
    ERROR, where its parts may stay pending. Return its provisioning_status, or DELETED if it does
    not exist."""
    status = "DELETED"

    def is_settled() -> bool:
        nonlocal status
        try:
            tree = client.load_balancer.get(f"/lbaas/loadbalancers/{balancer}/status").json()
            tree = tree.get("statuses", {}).get("loadbalancer", {})
        except NotFoundException:
            return True
        status = tree.get("provisioning_status", "DELETED")
        return status == "ERROR" or "PENDING_" not in str(tree)

    wait_until(is_settled)
    return status


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until the condition holds. Raise AssertionError after some minutes."""
    deadline, pause_s = time.monotonic() + TIMEOUT_S, FIRST_POLL_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.6, LAST_POLL_S)


def delete_load_balancers(client: Connection, project: str) -> None:
    """Delete all load balancers of the project, whatever their status, and wait until they are
    gone."""
    for balancer in client.load_balancer.load_balancers(project_id=project):
        while wait_settled(client, balancer.id) != "DELETED":
            try:
                client.load_balancer.delete_load_balancer(balancer.id, cascade=True)
            except ConflictException:  # another client has changed the load balancer meanwhile
                continue
