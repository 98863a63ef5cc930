"""The languages of routers. Pure."""

from collections.abc import Callable, Mapping

from fairlead.routers import bird, frr, ios, junos, linux, sonic
from fairlead.routers.values import Reach, Router

RENDERERS: Mapping[Router, Callable[[Reach], str]] = {
    "frr": frr.render,
    "bird": bird.render,
    "junos": junos.render,
    "ios": ios.render,
    "sonic": sonic.render,
    "linux": linux.render,
}

TAKES_WEIGHTS: frozenset[Router] = frozenset({"bird", "linux"})
"""Routers whose static routes can give next hops different shares."""


def render(reach: Reach, router: Router) -> str:
    """Return the plan in the language of this router. Raise Refused if it has no words for it."""
    return RENDERERS[router](reach)
