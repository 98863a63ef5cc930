"""The pinned eBPF maps of the gateway: their records, the classes that own them, and their memory.

records          the records of bpf/structs.h as bytes
pins             creating the maps, or adopting the maps that a previous process pinned
upgrade          copying the content of maps that another version pinned
listener_maps    listeners, their slots and their nodes: the maps that a change of a Service writes
listeners        the map of listeners, and the caches of it
nodes            the number of each node in the maps, and the next hops of each node
retained_nodes   the nodes that keep their open flows, for each listener
source_ranges    the sources that may connect to each Service
mirror           the content of the maps as last read or written
survey           reading the maps while another task changes them
table_allocator  where the tables of a listener are stored
arena            the free regions of the slot memory
counter_indexes  the element of the map `statistics` that counts for a listener
sizing           the table sizes that a listener may get where memory is short
quota            the share of each namespace in maps whose size is fixed
convergence      new listeners, whose tables may still differ between gateways
"""
