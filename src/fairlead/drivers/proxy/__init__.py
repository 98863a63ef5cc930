"""Class fairlead.io/proxy: one HAProxy for all Services of a gateway; and another one for the
Kubernetes API itself.

`spec` what should be and the steps to it (pure) · `render` HAProxy's configuration (pure) ·
`runtime` its sockets · `process` its life: start, reload, adoption, end · `driver` the four methods
of a driver · `apiserver` the balancer of the API."""

from fairlead.drivers.proxy.apiserver import ApiServerBalancer
from fairlead.drivers.proxy.driver import ProxyDriver

__all__ = ["ApiServerBalancer", "ProxyDriver"]
