"""The BGP peers of one host, with their passwords.

In: the configuration, BGPPeers and the host's Node in the State, files, Secrets. Out: the peers
that the driver of BGP configures. Invariants: the driver is not opened before the whole state is
known, because without peers it would end the sessions of the previous process. A password that
could be read once stays in use while it cannot be read again, and so do the labels of a Node that
is deleted: neither interrupts a session. Passwords appear in no message."""

import asyncio
import errno
import os
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import is_

import structlog

from fairlead.announce_sections import BgpConfig, BgpPeerSpec, SecretRef
from fairlead.backoff import Backoff
from fairlead.drivers import Component
from fairlead.drivers.bgp import Peer
from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.objects import SECRETS, ObjectKey
from fairlead.plan.peers import HostPeer, host_peers, refusal
from fairlead.state import State

log = structlog.get_logger()

CHECK_S = 0.5
"""The interval at which changes of BGPPeers and of the host's Node are noticed. Changes of the
State are marked by Service, and there may be none."""
REREAD_S = 30.0
"""The interval at which passwords are read again."""
REREAD_DOWN_S = 5.0
"""The same for the password of a peer without an established session: it may have been wrong."""
RETRY_S = (0.2, 5.0)
"""The first and the longest delay before the API server is asked again for a Secret."""
PATIENCE_S = 30.0
"""How long the other peers, and the start of the role, wait for a Secret that the API server cannot
return, for example because it cannot decrypt it."""
MAX_FILE_BYTES = 4096
"""More bytes of a file are not read. A password has 80 at most."""


class HostPeers(Component):
    """The component that keeps the peers of this host up to date. Call it for the peers. `host`:
    the name of the host and of its Node. `namespace`: that of the Secrets."""

    name = "bgp peers"

    def __init__(
        self, client: Client, state: State, section: BgpConfig, host: str, namespace: str
    ) -> None:
        self._state = state
        self._section = section
        self._host = host
        self._passwords = Passwords(client, namespace)
        self._peers: tuple[Peer, ...] = ()
        self._labels: Mapping[str, str] | None = None
        self._source: tuple[object, object] | None = None
        self.changed: Callable[[], None] = lambda: None
        """Called when the peers have changed."""
        self.established: Callable[[], Collection[str]] = tuple
        """Returns the names of the peers with an established session."""

    def __call__(self) -> Sequence[Peer]:
        return self._peers

    async def open(self) -> None:
        """Wait until the peers of this host are known."""
        await self._state.has_synced.wait()
        await self._refresh()

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        reread_s, reread_down_s = clock() + REREAD_S, clock() + REREAD_DOWN_S
        while True:
            await asyncio.sleep(CHECK_S)
            if clock() >= reread_s:
                reread_s = clock() + REREAD_S
                self._passwords.expire()
                self._source = None
            if clock() >= reread_down_s:
                reread_down_s = clock() + REREAD_DOWN_S
                self._expire_unestablished()
            await self._refresh()

    def _expire_unestablished(self) -> None:
        """Have the passwords of the peers without an established session read again."""
        established = self.established()
        for peer in self._peers:
            if peer.name not in established and self._passwords.expire_of(peer.spec):
                self._source = None

    async def _refresh(self) -> None:
        """Compute the peers again if something has changed on which they depend."""
        if (node := self._state.nodes.get(self._host)) is not None:
            self._labels = node.metadata.labels
        objects = self._state.bgp_peers
        if self._source is not None and all(map(is_, self._source, (objects, self._labels))):
            return
        source = (objects, self._labels)
        found = host_peers(self._section, objects or {}, self._labels)
        peers = tuple([await self._with_password(each) for each in found])
        self._source = source
        if peers != self._peers:
            self._peers = peers
            self.changed()

    async def _with_password(self, peer: HostPeer) -> Peer:
        if peer.problem is not None:
            return Peer(peer.name, peer.spec, problem=peer.problem)
        try:
            password = await self._passwords.of(peer.spec)
        except Refused as problem:
            finding = refusal(peer.name, problem.message, problem.fix)
            return Peer(peer.name, peer.spec, problem=finding)
        return Peer(peer.name, peer.spec, password)


class Passwords:
    """The passwords of BGP sessions, from files and Secrets. Each is read once, and again after
    `expire`."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._known: dict[str | SecretRef, str] = {}
        self._fresh: set[str | SecretRef] = set()
        self._failing: set[SecretRef] = set()
        """The Secrets for which PATIENCE_S is over."""

    def expire(self) -> None:
        """Have all passwords read again when they are next needed."""
        self._fresh.clear()

    def expire_of(self, spec: BgpPeerSpec) -> bool:
        """Have the password for this peer read again. Return False if the peer has none."""
        source = _source_of(spec)
        self._fresh.discard(source)
        return bool(source)

    async def of(self, spec: BgpPeerSpec) -> str:
        """Return the password for a peer; empty if it has none. Wait for PATIENCE_S, once for each
        Secret, while the API server does not answer and the password is unknown. Raise Refused if
        there is no password although the peer requires one."""
        source = _source_of(spec)
        if not source:
            return ""
        if source not in self._fresh:
            try:
                self._known[source] = await self._read(source)
                self._fresh.add(source)
            except FairleadError as problem:
                if source not in self._known:
                    raise
                self._fresh.add(source)
                log.warning("a password keeps its former value", problem=str(problem))
        return self._known[source]

    async def _read(self, source: str | SecretRef) -> str:
        if isinstance(source, str):
            try:
                return (await asyncio.to_thread(_text_of, source)).rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise Refused(
                    f"passwordFile {source} cannot be read: {reason}",
                    fix="create it where this role can read it; in a pod, set passwordSecret",
                ) from None
        retry, clock = Backoff(*RETRY_S), asyncio.get_running_loop().time
        until_s = clock() + PATIENCE_S
        while True:
            try:
                password = await self._secret(source)
            except Unavailable as problem:
                if source in self._known:
                    raise
                if source in self._failing or clock() >= until_s:
                    self._failing.add(source)
                    raise Refused(
                        f"Secret {self._namespace}/{source.name} cannot be read: {problem.message}",
                        fix="it is tried again",
                    ) from None
                await asyncio.sleep(retry.next_s())
            else:
                self._failing.discard(source)
                return password

    async def _secret(self, source: SecretRef) -> str:
        name = f"Secret {self._namespace}/{source.name}"
        try:
            found = await self._client.get(SECRETS, ObjectKey(self._namespace, source.name))
        except NotFound:
            raise Refused(f"{name} does not exist", fix="create it") from None
        except Refused as problem:
            raise Refused(
                f"{name} cannot be read: {problem.message}",
                fix="add its name to passwordSecrets of the chart",
            ) from None
        if source.key not in found.data:
            raise Refused(f"{name} has no key {source.key}", fix="add the key, or set `key`")
        try:
            return found.data[source.key].decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise Refused(f"key {source.key} of {name} is not text", fix="store text") from None


def _source_of(spec: BgpPeerSpec) -> str | SecretRef:
    """Return the file or the Secret with the password; empty if the peer has none."""
    return spec.password_file or spec.password_secret or ""


def _text_of(path: str) -> str:
    """Return the text of a file. Any BGPPeer can name the path, so a device or a pipe, which has no
    end, is not read. Raise OSError or UnicodeDecodeError."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    with open(path, "rb") as file:
        return file.read(MAX_FILE_BYTES).decode()
