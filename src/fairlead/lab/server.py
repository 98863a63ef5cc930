"""Start the API server of a lab, embedded or real, and write the files by which programs inside and
outside of the namespaces find it.

In: a lab's topology and run directory. Out: processes, `kubeconfig` (for this machine),
`kubeconfig_inside` (for the hosts of the lab), `apiserver.json`. The embedded server runs outside
of the namespaces and has a socket inside. The real server runs on the control host and is reached
from outside through a port forwarder. Invariants: when a `start_*` function returns, the server is
ready; `tear_down` finds everything that a failed start leaves.
"""

import socket
from contextlib import suppress

from fairlead.errors import Unavailable
from fairlead.kube.access import Access
from fairlead.lab import namespace, process, settings
from fairlead.lab.kubeapiserver import SERVER_NAME, KubeApiServer
from fairlead.lab.rundir import RunDirectory
from fairlead.lab.topology import API_PORT, CONTROL, SERVICES, Topology

SERVER_LABEL = "lab/apiserver"
FORWARDER_LABEL = "lab/forwarder"


async def start_embedded(topology: Topology, directory: RunDirectory) -> None:
    """Start the server of `lab.apiserver`, in memory. It accepts requests without credentials."""
    address = topology.host(CONTROL).addresses[0]
    with namespace.make_socket(topology.namespace(CONTROL)) as inner:
        inner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        inner.bind((address, API_PORT))
        inner.listen(1024)
        options = [
            "--listen",
            "127.0.0.1:0",
            "--fd",
            str(inner.fileno()),
            "--ready-file",
            str(directory.server_ready),
        ]
        for network in SERVICES:
            options += ["--service-cidr", str(network)]
        argv = process.python("fairlead.lab.apiserver", *options)
        started = process.spawn(
            topology.lab,
            SERVER_LABEL,
            argv,
            log=directory.log(SERVER_LABEL),
            pass_fds=(inner.fileno(),),
        )
    await _await_address(started, directory)
    _write(directory, Access(directory.server_url()), Access(f"http://{address}:{API_PORT}"))


async def start_real(topology: Topology, directory: RunDirectory) -> None:
    """Start kube-apiserver and etcd with the data in the run directory. Raise Refused when a
    program is missing."""
    server = real_server(topology, directory)
    await server.up()
    inside = topology.namespace(CONTROL)
    address = topology.host(CONTROL).addresses[0]
    argv = process.python(
        "fairlead.lab.forwarder", inside, address, str(API_PORT), str(directory.server_ready)
    )
    await _await_address(
        process.spawn(topology.lab, FORWARDER_LABEL, argv, log=directory.log(FORWARDER_LABEL)),
        directory,
    )
    within = server.access
    outside = Access(
        directory.server_url(),
        authority_pem=within.authority_pem,
        server_name=SERVER_NAME,
        token=within.token,
    )
    _write(directory, outside, within)


def real_server(topology: Topology, directory: RunDirectory) -> KubeApiServer:
    """Return the real server of a lab, whether it is up or not."""
    return KubeApiServer(
        directory.path / "kube-apiserver",
        lab=topology.lab,
        service_cidrs=[str(network) for network in SERVICES],
        inside=topology.namespace(CONTROL),
        address=topology.host(CONTROL).addresses[0],
        port=API_PORT,
        audit=True,
    )


def _write(directory: RunDirectory, outside: Access, within: Access) -> None:
    for path, access in ((directory.kubeconfig, outside), (directory.kubeconfig_inside, within)):
        directory.write_kubeconfig(path, settings.kubeconfig(directory.lab, access))


async def _await_address(started: process.Process, directory: RunDirectory) -> None:
    async def named() -> bool:
        with suppress(Unavailable):
            return bool(directory.server_url())
        return False

    await process.await_ready(started, named, log=directory.log(started.label))
