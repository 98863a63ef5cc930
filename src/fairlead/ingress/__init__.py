"""Settings of ingress controllers behind a load balancer, and a check of these settings with real
connections."""
