"""Serve a WSGI application on loopback, with a thread for each request, and report when it is
ready.

The test servers of OpenStack's packages handle one request at a time, and reject the sixth queued
one. Out: the line `READY` on standard output. The server ends with its process."""

import gc
import socketserver
from typing import Any
from wsgiref import simple_server

from tests.openstack.servers.ready import READY


class _Server(socketserver.ThreadingMixIn, simple_server.WSGIServer):
    daemon_threads = True
    request_queue_size = 128


class _Handler(simple_server.WSGIRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Log nothing: a FaultProxy records the requests."""

    def address_string(self) -> str:
        return str(self.client_address[0])  # no name is looked up


def serve(application: Any, port: int) -> None:
    """Serve forever."""
    server = simple_server.make_server("127.0.0.1", port, application, _Server, _Handler)
    # Imported modules stay forever and are many, so the garbage collector need not scan them again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    print(READY, flush=True)
    server.serve_forever()
