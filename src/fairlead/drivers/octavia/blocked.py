"""The reasons why no write helps a Service at present, and when to look again.

In: the desired and the actual state. Out: Blocked values, each with its Outcome. Pure."""

from fairlead.drivers.octavia.balancers import (
    BalancerSpec,
    BalancerState,
)
from fairlead.drivers.octavia.changes import Blocked
from fairlead.model import Outcome, ServiceKey

GIVEN_UP_RETRY_S = 900.0
"""After MAX_ATTEMPTS failures, a load balancer is tried again at this interval."""
OBSTACLE_RETRY_S = 20.0
"""The interval for reading a shared load balancer again whose ports or state block a Service."""


def planned_for_another(wanted: BalancerSpec, balancer: BalancerState) -> Blocked:
    what = f"of provider {balancer.provider}, with addresses of {' and '.join(balancer.families)}"
    message = f"the Service is planned again, because its load balancer {balancer.id} is {what}"
    return Blocked(wanted.service, Outcome("waiting", message))


def in_progress(key: ServiceKey, balancer: BalancerState, poll_s: float) -> Blocked:
    message = f"Octavia is working on load balancer {balancer.id} ({balancer.status})"
    return Blocked(key, Outcome("waiting", message, again_s=poll_s))


def not_located(wanted: BalancerSpec) -> Blocked:
    """Report that the load balancer that the Service requests has not been searched for yet."""
    requested = wanted.shared_or_adopted
    what = "its own" if requested is None else requested.id or " or ".join(requested.names)
    message = f"waiting for the search for the Service's load balancer: {what}"
    return Blocked(wanted.service, Outcome("waiting", message))


def given_up(key: ServiceKey, id_: str, attempts: int) -> Blocked:
    """Report that MAX_ATTEMPTS attempts failed. `id_` is empty if no load balancer could be
    created."""
    problem = (
        f"load balancer {id_} is in ERROR, {attempts} attempts to repair it failed"
        if id_
        else f"Octavia has failed {attempts} times to create a load balancer"
    )
    fix = (
        f"ask the cloud's operators; Fairlead tries again every {GIVEN_UP_RETRY_S / 60:.0f} minutes"
    )
    return Blocked(key, Outcome("unavailable", f"{problem}; {fix}", again_s=GIVEN_UP_RETRY_S / 10))


def obstacle(key: ServiceKey, message: str, fix: str) -> Blocked:
    """Report that another user of a shared load balancer, or its state, blocks the Service."""
    return Blocked(key, Outcome("unavailable", f"{message}; {fix}", again_s=OBSTACLE_RETRY_S))
