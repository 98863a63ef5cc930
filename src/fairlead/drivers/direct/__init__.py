"""Class fairlead.io/direct: packets handed to the nodes unmodified by eBPF on the gateways (direct server return).

spec      what should be and what is, as values; render and diff
driver    the driver: open, read, apply, counters
steps     carrying changes out, each Service for itself
tables    listeners, slots and nodes in the pinned maps
mirror    what these hold, as last read or written
pins      making the maps, or adopting those that a predecessor left
next_hop  where to send what a node gets
arena     which part of the slot memory is free
layout    the records of bpf/structs.h as bytes
"""

from fairlead.drivers.direct.driver import DirectDriver, Entries, Traffic, remove_pins
from fairlead.drivers.direct.spec import DirectActual, DirectSpec, ListenerSpec

__all__ = ["DirectActual", "DirectDriver", "DirectSpec", "Entries", "ListenerSpec", "Traffic", "remove_pins"]
