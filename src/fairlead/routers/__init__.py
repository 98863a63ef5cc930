"""What the routers of a network need, so that load-balancer addresses are reachable: routes, or
sessions with the hosts that announce the addresses, as the text of several routers. Pure.

`reach` decides from the pools, the hosts and the configuration; `frr`, `bird`, `linux`, `junos` and
`ios` write its decision in the language of one router; `notes` names the traps of networks."""
