"""A real OVN in network namespaces of one machine: databases, northd, and hypervisors whose packets
Open vSwitch forwards in userspace, so that no kernel module is needed."""
