"""Serve a WSGI application on loopback, a thread for each request, and say when it is ready.

The servers that OpenStack's packages bring for trials take one request after another and turn the
sixth in the queue away. Out: the line `READY` on standard output. Ends with its process."""

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
        """Who wants to know what was asked stands a front before the server."""

    def address_string(self) -> str:
        return str(self.client_address[0])  # no name is looked up


def serve(application: Any, port: int) -> None:
    """Serve for ever."""
    server = simple_server.make_server("127.0.0.1", port, application, _Server, _Handler)
    # What was imported stays for ever, and is much: no use in going through it again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    print(READY, flush=True)
    server.serve_forever()
