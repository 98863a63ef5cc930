"""Why no write brings a Service further now, and when to look again.

In: what was wanted, what was found. Out: Blocked, each with its Outcome. Pure."""

from fairlead.drivers.octavia.balancers import (
    BalancerSpec,
    BalancerState,
)
from fairlead.drivers.octavia.changes import Blocked
from fairlead.model import Outcome, ServiceKey

GIVEN_UP_RETRY_S = 900.0
"""After too many attempts in a row one load balancer is tried again no more often."""
OBSTACLE_RETRY_S = 20.0
"""When to look again at a shared load balancer that others hold."""


def planned_for_another(wanted: BalancerSpec, balancer: BalancerState) -> Blocked:
    what = f"of provider {balancer.provider}, with addresses of {' and '.join(balancer.families)}"
    message = f"it is planned anew, as its load balancer {balancer.id} is {what}"
    return Blocked(wanted.service, Outcome("waiting", message))


def at_work(key: ServiceKey, balancer: BalancerState, look_s: float) -> Blocked:
    message = f"Octavia is at work on load balancer {balancer.id}, which is in {balancer.status}"
    return Blocked(key, Outcome("waiting", message, again_s=look_s))


def not_located(wanted: BalancerSpec) -> Blocked:
    """The wish is newer than the last look."""
    wish = wanted.elsewhere
    what = "none any more" if wish is None else wish.id or " or ".join(wish.names)
    message = f"the load balancer that the Service is to be on is looked for: {what}"
    return Blocked(wanted.service, Outcome("waiting", message))


def given_up(key: ServiceKey, id_: str, attempts: int) -> Blocked:
    """`id_`: empty if no load balancer has come of it."""
    problem = (
        f"load balancer {id_} is in ERROR, {attempts} attempts to repair it failed"
        if id_
        else f"Octavia has failed {attempts} times to make a load balancer"
    )
    fix = "ask the cloud's operators; it is tried again now and then"
    return Blocked(key, Outcome("unavailable", f"{problem}; {fix}", again_s=GIVEN_UP_RETRY_S / 10))


def obstacle(key: ServiceKey, message: str, fix: str) -> Blocked:
    """Others hold something on a shared load balancer."""
    return Blocked(key, Outcome("unavailable", f"{message}; {fix}", again_s=OBSTACLE_RETRY_S))
