"""An API server in memory, for the lab and the tests: the part of the Kubernetes API that load
balancing needs.

`server.ApiServer` serves HTTP; `python -m fairlead.lab.apiserver` does so as a process. Below it,
in the order of the data: `request` (what is asked for), `registry` (the verbs), `service`,
`service_rules`, `families`, `validation`, `allocation`, `binding` (what an object becomes, or why
not), `patch`, `apply`, `ownership` (how writes merge), `store` (objects and history), `listing`,
`watching`, `table` (how they are read), `faults` (how it fails when told to). What a kind is made
of stands in `kinds`, `fields`, `pod_fields` and `schema`; `wire` checks by it, `discovery` and
`openapi` tell it to clients. Where it differs from the real server, it is wrong: the same tests run
on both."""

from fairlead.lab.apiserver.failure import ApiFailure
from fairlead.lab.apiserver.faults import Fault, Faults, Request
from fairlead.lab.apiserver.registry import Registry
from fairlead.lab.apiserver.server import ApiServer
from fairlead.lab.apiserver.store import Store
from fairlead.lab.apiserver.writes import Deletion, Write

__all__ = [
    "ApiFailure",
    "ApiServer",
    "Deletion",
    "Fault",
    "Faults",
    "Registry",
    "Request",
    "Store",
    "Write",
]
