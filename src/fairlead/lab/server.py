"""The API server of a lab, embedded or real, and the files by which programs on both sides of the
namespaces find it.

In: a lab's topology and run directory. Out: processes, `kubeconfig` (for this machine),
`kubeconfig_inside` (for the hosts of the lab), `apiserver.json`. The embedded one runs outside of
the namespaces, with a socket inside; the real one runs on the control host, with a doorway outside.
Invariant: what `start` returns from is ready; what it leaves when it fails is found by `demolish`.
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
DOORWAY_LABEL = "lab/doorway"


async def start_embedded(topology: Topology, directory: RunDirectory) -> None:
    """The server of `lab.apiserver`, in memory. It asks for no credentials."""
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
    """kube-apiserver with its etcd, as `directory.path / "kube-apiserver"` holds them. Raises
    Refused without the programs."""
    server = real_server(topology, directory)
    await server.up()
    inside = topology.namespace(CONTROL)
    address = topology.host(CONTROL).addresses[0]
    argv = process.python(
        "fairlead.lab.doorway", inside, address, str(API_PORT), str(directory.server_ready)
    )
    await _await_address(
        process.spawn(topology.lab, DOORWAY_LABEL, argv, log=directory.log(DOORWAY_LABEL)),
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
    """The real server of a lab, up or not."""
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
