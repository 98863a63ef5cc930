"""Ingress controllers behind a load balancer: the settings that belong together, and a check with
real connections."""
