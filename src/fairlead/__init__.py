"""Load balancers for Kubernetes Services of type LoadBalancer, with full support for
externalTrafficPolicy Local."""

__version__ = "0.1.0"
