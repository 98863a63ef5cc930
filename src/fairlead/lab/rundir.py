"""The run directory of a lab: its files, and the list of labs on this machine.

In: a lab's name. Out: paths below /run/fairlead/lab/<name>, and the lab's size. Only the size is
stored: everything else follows from it (`topology`) or is read from the machine (`namespace`,
`process`).
"""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from fairlead.config import AttachKind, ForwardingMethod, TunnelKind
from fairlead.errors import Refused, Unavailable
from fairlead.invocation import called
from fairlead.kube.access import Access
from fairlead.kube.kubeconfig import read_kubeconfig
from fairlead.lab import namespace
from fairlead.lab.topology import Announcement, Topology, check_name, is_name, plan_topology

ROOT = Path("/run/fairlead/lab")
PINS = Path("/sys/fs/bpf/fairlead-lab")
"""Parent of the pins of all labs on this machine. It is neither inside nor above the default of
`gateway.pinPath`, which belongs to a gateway that runs on the machine itself."""


ApiServerKind = Literal["embedded", "real"]
"""`embedded`: in memory, with fault injection. `real`: kube-apiserver with etcd and RBAC."""


class Transport(msgspec.Struct, frozen=True, kw_only=True):
    """How packets get from gateways to nodes: `tunnel.kind`, `gateway.forwarding` and
    `gateway.attach` of the configuration. `peers`: whether gateways exchange their new flow
    entries."""

    tunnel: TunnelKind = "none"
    forwarding: ForwardingMethod = "auto"
    attach: AttachKind = "auto"
    peers: bool = False


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """The number of hosts of each kind, whether Fairlead's roles run on them, the kind of API
    server, how packets get from gateways to nodes, and how the router learns where VIPs are."""

    nodes: int = 4
    gateways: int = 1
    clients: int = 1
    far_nodes: int = 0
    """Number of nodes on another network than the gateways. Their numbers follow those of the other
    nodes."""
    gateways_on_nodes: bool = False
    """Whether the nodes are the gateways; no other host is a gateway then."""
    roles: bool = True
    apiserver: ApiServerKind = "embedded"
    transport: Transport = Transport()
    announce: Announcement = "none"

    def topology(self, lab: str) -> Topology:
        """Return the topology of a lab with this name and size. Raise Refused as `plan_topology`
        does."""
        return plan_topology(
            lab,
            self.nodes,
            self.gateways,
            self.clients,
            far_nodes=self.far_nodes,
            gateways_on_nodes=self.gateways_on_nodes,
            announce=self.announce,
        )


class Urls(msgspec.Struct, frozen=True):
    """The ready file of the API server."""

    urls: tuple[str, ...]


class RunDirectory:
    """The files of a lab. Only `make` creates the directory. Raise Refused for an invalid lab
    name."""

    def __init__(self, lab: str) -> None:
        check_name(lab)
        self.lab = lab
        self.path = ROOT / lab
        self.config = self.path / "fairlead.yaml"
        self.kubeconfig = self.path / "kubeconfig"
        self.kubeconfig_inside = self.path / "kubeconfig-inside"
        self.server_ready = self.path / "apiserver.json"
        self.cluster_ready = self.path / "cluster.json"
        self._size = self.path / "size.json"
        self._off = self.path / "off"

    def make(self, size: Size) -> None:
        """Create the directory. Raise Refused when the lab exists."""
        try:
            self.path.mkdir(parents=True)
        except FileExistsError as error:
            raise Refused(
                f"lab {self.lab} exists already",
                fix=f"take it down, `{called(f'lab down --name {self.lab}')}`",
            ) from error
        (self.path / "logs").mkdir()
        self._off.mkdir()
        self._size.write_bytes(msgspec.json.encode(size))

    def size(self) -> Size:
        """Return the size of the lab. Raise Refused when the lab does not exist."""
        try:
            return msgspec.json.decode(self._size.read_bytes(), type=Size)
        except FileNotFoundError as error:
            known = ", ".join(labs()) or "none"
            raise Refused(
                f"there is no lab {self.lab}; labs on this machine: {known}",
                fix=f"see `{called('lab up --help')}`",
            ) from error

    def topology(self) -> Topology:
        """Return the topology of the lab. Raise Refused when the lab does not exist."""
        return self.size().topology(self.lab)

    def server_url(self) -> str:
        """Return the API server's URL on this machine. Raise Unavailable while there is no
        server."""
        try:
            urls = msgspec.json.decode(self.server_ready.read_bytes(), type=Urls).urls
        except (FileNotFoundError, msgspec.DecodeError) as error:
            raise Unavailable(f"lab {self.lab} has no API server yet") from error
        # The list also contains the socket inside the lab, which this machine cannot reach.
        return next(url for url in urls if urlsplit(url).hostname == "127.0.0.1")

    def kubeconfig_of(self, role: str) -> Path:
        """Return the kubeconfig of a role: that of its own account where the API server
        authenticates, else the common one."""
        own = self.path / f"kubeconfig-{role}"
        return own if self.size().apiserver == "real" else self.kubeconfig_inside

    @staticmethod
    def write_kubeconfig(path: Path, text: str) -> None:
        """Write a kubeconfig that only root can read, because it contains a token."""
        path.touch(mode=0o600)
        path.write_text(text)

    def access(self) -> Access:
        """Return the access to the API server from this machine. Raise Unavailable while there is
        no server."""
        if not self.kubeconfig.exists():
            raise Unavailable(f"lab {self.lab} has no API server yet")
        return read_kubeconfig([self.kubeconfig])

    def log(self, label: str) -> Path:
        """Return the log file of a process."""
        return self.path / "logs" / f"{label.replace('/', '-')}.log"

    def pins(self, host: str) -> Path:
        """Return the folder on the bpffs for a gateway's pins."""
        return PINS / f"{self.lab}-{host}"

    def proxy(self, host: str) -> Path:
        """Return the folder of a gateway's HAProxy."""
        return self.path / f"haproxy-{host}"

    def remove_pins(self, host: str = "*") -> None:
        """Remove the pins of one gateway, or of all; the kernel frees the objects that only the
        pins held."""
        for pins in PINS.glob(f"{self.lab}-{host}"):
            shutil.rmtree(pins)
        with suppress(OSError):  # another lab has pins there
            PINS.rmdir()

    def switch(self, host: str, *, on: bool) -> None:
        """Record that a machine is switched off or on. Its kubelet checks this before each action
        on the machine."""
        if on:
            (self._off / host).unlink(missing_ok=True)
        else:
            (self._off / host).touch()

    def is_off(self, host: str) -> bool:
        """Return whether the machine is switched off. True also when the whole directory is
        gone."""
        return (self._off / host).exists() or not self._off.exists()

    def remove(self) -> None:
        """Remove the directory and the pins."""
        self.remove_pins()
        if self.path.exists():
            shutil.rmtree(self.path)
        with suppress(OSError):  # other labs are there
            ROOT.rmdir()
            ROOT.parent.rmdir()


def all_labs() -> tuple[str, ...]:
    """Return the labs that exist at least in part: a run directory, or only namespaces, if the
    directory was lost."""
    left = {name.removeprefix("fl-").partition("-")[0] for name in namespace.names("fl-")}
    return tuple(sorted(filter(is_name, {*labs(), *left})))


def labs() -> tuple[str, ...]:
    """Return the labs on this machine that have a run directory."""
    return tuple(sorted(path.name for path in ROOT.iterdir())) if ROOT.is_dir() else ()
