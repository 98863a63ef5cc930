"""What a gateway may leave on its host: the data planes of its classes, as configured.

In: the configuration. Out: drivers that are not open yet. Invariant: a clean-up makes the same
drivers as the role, so it finds everything that the role has left."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fairlead.config import Config
from fairlead.drivers.direct import (
    DirectDriver,
    Peers,
    PeerTLS,
    ProbePaths,
    Rules,
    Sizes,
)
from fairlead.drivers.proxy import ApiServerBalancer, ProxyDriver
from fairlead.state import State


class DataPlane(NamedTuple):
    """The parts of the data plane on this host."""

    apiserver: ApiServerBalancer
    probe_paths: ProbePaths
    direct: DirectDriver
    proxy: ProxyDriver


def data_plane(
    config: Config, selectors: Sequence[str], state: State, peers: Peers | None = None
) -> DataPlane:
    """Return everything that a gateway may leave on its host, according to the configuration."""
    section = config.gateway
    return DataPlane(
        apiserver_balancer(config),
        ProbePaths(rules_of(config), Path(section.pin_path), partial(setattr, state, "tunnels")),
        direct_driver(config, selectors, state, peers),
        ProxyDriver(
            Path(section.proxy_path),
            requeue=state.subscribers.mark,
            drain_s=section.drain_timeout_s,
            old_workers=section.proxy_old_workers,
        ),
    )


def direct_driver(
    config: Config, selectors: Sequence[str], state: State, peers: Peers | None
) -> DirectDriver:
    """Return the driver of class direct, for the interfaces that match these selectors."""
    section = config.gateway
    return DirectDriver(
        selectors,
        attach_kind=section.attach,
        rules=rules_of(config),
        pin_path=Path(section.pin_path),
        drain_s=section.drain_timeout_s,
        requeue=state.subscribers.mark,
        inherit=peers.inherit if peers is not None else None,
        sizes=Sizes(
            section.table_memory_mib << 20, section.connection_entries, section.datagram_entries
        ),
        namespace_share=section.namespace_share,
    )


def rules_of(config: Config) -> Rules:
    """Return the configured rules for the forwarding method of each node."""
    tunnel = config.tunnel
    return Rules(config.gateway.forwarding, tunnel.kind, tunnel.vni, tunnel.port, tunnel.gateways)


def apiserver_balancer(config: Config) -> ApiServerBalancer:
    """Return the load balancer of the API servers. It does nothing if none is configured."""
    return ApiServerBalancer(config.gateway.api_server, Path(f"{config.gateway.proxy_path}-api"))


def peers_of(config: Config) -> Peers | None:
    """Return the exchange with other gateways, or None if none is configured. Raise Refused if the
    certificates cannot be used."""
    section = config.gateway
    if not section.peer_address and not section.peers:
        return None
    tls = PeerTLS(section.peer_tls) if section.peer_tls is not None else None
    if tls is not None:
        tls.load()
    return Peers(section.peer_address, None if section.peers == "auto" else section.peers, tls=tls)
