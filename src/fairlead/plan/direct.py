"""The terms of class `fairlead.io/direct`: gateways hand packets to nodes as they are.

In: a Service. Out: `Terms`. Every port is served, in every protocol. Pure."""

from fairlead.model import DirectSettings
from fairlead.plan.annotations import drain_timeout_s
from fairlead.plan.terms import Asked, Terms

DIRECT = "fairlead.io/direct"


def direct_terms(asked: Asked) -> Terms:
    return Terms(DirectSettings(drain_timeout_s(asked.service.metadata.annotations)))
