"""What the data plane takes from the host's network, and what it sets there.

next_hops     how a packet gets to a node: directly on a link, or through a tunnel
host_network  the next hops as the host's routes and neighbours are now, followed by events
networks      updates of everything that depends on the host's networks
attach        the programs at the interfaces: XDP, or tc
blackhole     routes that drop packets for addresses of listeners that nothing else takes
probe_paths   the tunnels for the gateway's own probes
requirements  the sysctls that the data plane needs
"""
