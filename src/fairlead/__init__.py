"""Fairlead: Kubernetes Services of type LoadBalancer with externalTrafficPolicy Local that fully
work."""

__version__ = "0.1.0"
