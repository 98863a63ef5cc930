"""Clusters out of network namespaces on one machine: real packets, the shipped roles, an API server
in memory."""
