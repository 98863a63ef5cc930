"""Build clusters out of network namespaces on one machine: real packets, the shipped roles, and an
in-memory or a real API server."""
