"""Class fairlead.io/proxy: one HAProxy for all Services of a gateway. A second HAProxy balances the
Kubernetes API itself.

- `driver`: the driver: `render`, `diff`, `read`, `apply`.
- `spec`: the desired and the actual state, and the steps between them (pure).
- `render`: HAProxy's configuration (pure).
- `process`: start, reload, adoption and end of the HAProxy process.
- `runtime`: commands on HAProxy's sockets.
- `members`, `drains`, `workers`: servers of a running HAProxy, drained servers, old workers.
- `reloads`: which namespaces may cause a reload (pure).
- `shares`: the shares of namespaces and Services in HAProxy's connections (pure).
- `states`: the server states that a new worker inherits (pure).
- `counters`, `metrics`: traffic by Service.
- `shield`: nftables rules that keep other ports of the host unreachable at Service addresses.
- `apiserver`: the balancer of the Kubernetes API.
- `removal`: removes everything that a HAProxy of this package left on the host."""

from fairlead.drivers.proxy.apiserver import ApiServerBalancer
from fairlead.drivers.proxy.driver import ProxyDriver

__all__ = ["ApiServerBalancer", "ProxyDriver"]
