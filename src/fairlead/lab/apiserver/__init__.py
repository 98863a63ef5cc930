"""An API server in memory, for the lab and the tests: the part of the Kubernetes API that load
balancing needs.

`server.ApiServer` serves HTTP, and `python -m fairlead.lab.apiserver` runs it as a process. Below
it, in the order in which data passes through: `request` (parses requests), `registry` (the verbs);
`validation` and `binding` (default, check and complete an object; the rules for Services are those
of `fairlead.kube.rules`); `patch`, `apply`, `ownership` (merge writes); `store` (objects and their
history); `listing`, `watching`, `table` (reads); `faults` (fault injection). `kinds`,
`pod_fields` and `schema` define the kinds: `wire` checks objects by them, and `discovery` and
`openapi` publish them. Any difference from the real server is a bug: the same tests run against
both.
"""

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
