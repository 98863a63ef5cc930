"""What the routers of a network need, so that packets for load-balancer addresses reach the
gateways: routes, or BGP sessions with a speaker on the gateways. Pure.

`planning` decides from the pools and the gateways; `static`, `frr` and `bird` write the decision in
the language of one router; `speaker` writes the other side of the sessions, for a BIRD on the
gateways."""
