"""The run directory of a lab: where its files are, and which labs there are.

In: a lab's name. Out: paths under /run/fairlead/lab/<name>, and the lab's size, which is all that
must be remembered: the rest follows from it (`topology`) or is read from the machine itself
(`namespace`, `process`)."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from fairlead.config import AttachKind, ForwardingMethod, TunnelKind
from fairlead.errors import Refused, Unavailable
from fairlead.kube.access import Access
from fairlead.kube.kubeconfig import read_kubeconfig
from fairlead.lab import namespace
from fairlead.lab.invocation import called
from fairlead.lab.topology import Topology, check_name, is_name, plan_topology

ROOT = Path("/run/fairlead/lab")
PINS = Path("/sys/fs/bpf/fairlead-lab")
"""Parent of the pins of all labs on this machine. It is neither inside nor above the default of
`gateway.pinPath`, which belongs to a gateway of the machine itself."""


ApiServerKind = Literal["embedded", "real"]
"""`embedded`: in memory, can be told to fail. `real`: kube-apiserver with etcd, RBAC on."""


class Transport(msgspec.Struct, frozen=True, kw_only=True):
    """How packets get from gateways to nodes: `tunnel.kind`, `gateway.forwarding` and `gateway.attach` of
    the configuration. `peers`: whether gateways tell each other their new entries."""

    tunnel: TunnelKind = "none"
    forwarding: ForwardingMethod = "auto"
    attach: AttachKind = "auto"
    peers: bool = False


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How many hosts of each kind a lab has, whether Fairlead's roles are to run on them, which API
    server, and how packets get from gateways to nodes."""

    nodes: int = 4
    gateways: int = 1
    clients: int = 1
    far_nodes: int = 0
    """Nodes on another network than the gateways', after the others by number."""
    gateways_on_nodes: bool = False
    """Every node is a gateway too, and no other host is."""
    roles: bool = True
    apiserver: ApiServerKind = "embedded"
    transport: Transport = Transport()

    def topology(self, lab: str) -> Topology:
        """The lab of this name and size. Raises Refused as `plan_topology` does."""
        far, on_nodes = self.far_nodes, self.gateways_on_nodes
        return plan_topology(
            lab, self.nodes, self.gateways, self.clients, far_nodes=far, gateways_on_nodes=on_nodes
        )


class Urls(msgspec.Struct, frozen=True):
    """What the API server writes when it is ready."""

    urls: tuple[str, ...]


class RunDirectory:
    """The files of one lab. Nothing is made before `make`. Raises Refused for what cannot be a
    lab's name."""

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
        """Make the directory. Raises Refused when the lab exists."""
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
        """The size of the lab that is there. Raises Refused when there is none."""
        try:
            return msgspec.json.decode(self._size.read_bytes(), type=Size)
        except FileNotFoundError as error:
            known = ", ".join(labs()) or "none"
            raise Refused(
                f"there is no lab {self.lab}; labs on this machine: {known}",
                fix=f"see `{called('lab up --help')}`",
            ) from error

    def topology(self) -> Topology:
        """The lab that is there. Raises Refused when there is none."""
        return self.size().topology(self.lab)

    def server_url(self) -> str:
        """The API server's URL on this machine. Raises Unavailable while there is none."""
        try:
            urls = msgspec.json.decode(self.server_ready.read_bytes(), type=Urls).urls
        except (FileNotFoundError, msgspec.DecodeError) as error:
            raise Unavailable(f"lab {self.lab} has no API server yet") from error
        # It also names the socket inside the lab, where this machine cannot reach it.
        return next(url for url in urls if urlsplit(url).hostname == "127.0.0.1")

    def kubeconfig_of(self, role: str) -> Path:
        """What a role of Fairlead uses: its own account's if the API server asks who it is, else
        everybody's."""
        own = self.path / f"kubeconfig-{role}"
        return own if self.size().apiserver == "real" else self.kubeconfig_inside

    @staticmethod
    def write_kubeconfig(path: Path, text: str) -> None:
        """For root's eyes alone: it holds a token."""
        path.touch(mode=0o600)
        path.write_text(text)

    def access(self) -> Access:
        """The way to the API server from this machine. Raises Unavailable while there is none."""
        if not self.kubeconfig.exists():
            raise Unavailable(f"lab {self.lab} has no API server yet")
        return read_kubeconfig([self.kubeconfig])

    def log(self, label: str) -> Path:
        """Where a process's output goes."""
        return self.path / "logs" / f"{label.replace('/', '-')}.log"

    def pins(self, host: str) -> Path:
        """The folder on the bpffs for a gateway's pins."""
        return PINS / f"{self.lab}-{host}"

    def proxy(self, host: str) -> Path:
        """The folder for a gateway's HAProxy."""
        return self.path / f"haproxy-{host}"

    def remove_pins(self, host: str = "*") -> None:
        """Remove the pins of one gateway, or of all: the kernel lets go of what only they held."""
        for pins in PINS.glob(f"{self.lab}-{host}"):
            shutil.rmtree(pins)
        with suppress(OSError):  # another lab has pins there
            PINS.rmdir()

    def switch(self, host: str, *, on: bool) -> None:
        """Note that a machine is switched off or on. Its kubelet looks here before it does anything
        for the machine."""
        if on:
            (self._off / host).unlink(missing_ok=True)
        else:
            (self._off / host).touch()

    def is_off(self, host: str) -> bool:
        """Whether the machine is switched off. Also when the whole directory is gone."""
        return (self._off / host).exists() or not self._off.exists()

    def remove(self) -> None:
        """Remove the directory, pins too."""
        self.remove_pins()
        if self.path.exists():
            shutil.rmtree(self.path)
        with suppress(OSError):  # other labs are there
            ROOT.rmdir()
            ROOT.parent.rmdir()


def all_labs() -> tuple[str, ...]:
    """The labs of which anything is there: a run directory, or only namespaces, if the directory
    was lost."""
    left = {name.removeprefix("fl-").partition("-")[0] for name in namespace.names("fl-")}
    return tuple(sorted(filter(is_name, {*labs(), *left})))


def labs() -> tuple[str, ...]:
    """The labs on this machine that have a run directory."""
    return tuple(sorted(path.name for path in ROOT.iterdir())) if ROOT.is_dir() else ()
