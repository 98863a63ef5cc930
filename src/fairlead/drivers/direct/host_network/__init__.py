"""What the data plane takes from the host's network, and what it sets there.

next_hops     how a packet gets to a node: directly on a link, or through a tunnel
host_network  the next hops according to the host's present routes and neighbours
networks      updates of everything that depends on the host's networks
attach        the programs at the interfaces: XDP, or tc
blackhole     routes that drop packets for load-balancer addresses that match no listener
probe_paths   the tunnels for the gateway's probes
requirements  the sysctls that the data plane requires
"""
