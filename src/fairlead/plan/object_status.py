"""Conditions of the objects of group `fairlead.io`, as the controller decides them. Pure.

Follows the API conventions of Kubernetes, section "Typical status properties"."""

from typing import Literal

from fairlead.model import Value

HEALTHY_IF_TRUE = frozenset({"Ready", "Accepted", "Established"})
"""The types of conditions whose status is True while all is well. With the other types it is
False."""


class ObjectCondition(Value, frozen=True):
    """A condition of an object, without its transition time."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
