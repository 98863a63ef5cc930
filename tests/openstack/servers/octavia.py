"""Octavia's API, the worker's end of its queue and the receiver of heartbeats, all in one process.

In: an octavia.conf, the port to serve on. Runs in OpenStack's environment: `python -m
tests.openstack.servers.octavia CONF PORT`. One process needs no message broker (oslo.messaging's
transport `fake://`). The code of all three is upstream's, and so are the drivers that replace an
amphora and its hypervisor."""

import sys
import threading
from pathlib import Path

import sqlalchemy
from futurist import SynchronousExecutor
from tests.openstack.servers import amphorae, certificates, machines, sockets, wsgi


def main() -> None:
    conf, port = Path(sys.argv[1]), int(sys.argv[2])
    directory = conf.parent
    _keep_within(directory)
    certificates.make(directory)
    # These imports come after the redirection above, which the modules use when they are imported.
    from octavia.api import app

    amphorae.install_faults(directory)
    certificates.share_key()
    _load_with_fewer_statements()
    application = app.setup_app(argv=["octavia-api", "--config-file", str(conf)])
    machines.plug_into_neutron()
    _work()
    threading.Thread(target=_listen_to_heartbeats, daemon=True).start()
    wsgi.serve(application, port)


def _keep_within(directory: Path) -> None:
    """Redirect two paths that are fixed in upstream's code: the no-op drivers keep ports in a file
    in /tmp, and providers look for the driver agent in /var/run."""
    make_engine = sqlalchemy.create_engine

    def make_engine_here(url: str, **settings: object) -> sqlalchemy.Engine:
        here = str(url).endswith("/octavia-network-noop.db")
        return make_engine(f"sqlite:///{directory}/ports.db" if here else url, **settings)

    sqlalchemy.create_engine = make_engine_here
    sockets.place_in(directory)


def _load_with_fewer_statements() -> None:
    """Let SQLAlchemy load related rows by their keys (`selectin`) instead of by a repetition of the
    original query (`subquery`). The result does not differ. SQLAlchemy compiles a repeated query
    anew each time, which takes a large part of the processor time of Octavia."""
    from octavia.db import models, repositories
    from sqlalchemy import orm

    assert repositories.subqueryload is orm.subqueryload
    repositories.subqueryload = orm.selectinload
    for mapper in models.LoadBalancer.registry.mappers:
        for each in mapper._init_properties.values():
            if getattr(each, "lazy", "") == "subquery":
                each.lazy = "selectin"
                each.strategy_key = (("lazy", "selectin"),)


def _work() -> None:
    """Run the worker as octavia-worker does."""
    import oslo_messaging
    from octavia.common import constants, rpc
    from octavia.controller.queue.v2 import endpoints
    from oslo_config import cfg
    from oslo_messaging.rpc import dispatcher

    target = oslo_messaging.Target(
        topic=constants.TOPIC_AMPHORA_V2, server=cfg.CONF.host, fanout=False
    )
    rpc.get_server(
        target, [endpoints.Endpoints()], access_policy=dispatcher.DefaultRPCAccessPolicy
    ).start()


def _listen_to_heartbeats() -> None:
    """Receive heartbeats as octavia-health-manager does, which passes each to a pool of
    processes."""
    from octavia.amphorae.drivers.health import heartbeat_udp

    receiver = heartbeat_udp.UDPStatusGetter()
    receiver.health_executor = receiver.stats_executor = SynchronousExecutor()
    while True:
        receiver.check()


if __name__ == "__main__":
    main()
