"""The driver that announces the addresses of Services by BGP.

In: LoadBalancers. Out: a route in a kernel table of its own for each of their addresses, which BIRD
reads and announces. BIRD is a process of its own on the host: it outlives this one, and is started
by the operator with the configuration that this driver writes. It is the last driver of its chain:
an address is announced after the drivers before it serve the Service, and withdrawn before they
stop.

Invariants: what is announced is what the kernel table has. A restart of this process, and an API
server that is away, change nothing; after a boot the table is empty, so nothing is announced before
this gateway serves it. No packet is looked up in the table. BIRD reads bird.conf only when it has
changed, because some changes reset sessions."""

import asyncio
import os
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import closing, suppress
from pathlib import Path

import structlog

from fairlead.drivers import Component
from fairlead.drivers.bgp import spec
from fairlead.drivers.bgp.metrics import BgpCollector
from fairlead.drivers.bgp.render import configuration
from fairlead.drivers.bgp.sessions import Look, findings_of, is_configured, sessions_of
from fairlead.drivers.bgp.spec import Change, Spec
from fairlead.errors import FairleadError, Refused, plain
from fairlead.model import Finding, LoadBalancer, Outcome, ServiceKey
from fairlead.net.bird import Bird
from fairlead.net.blackhole import Blackholes
from fairlead.role_state import BgpState
from fairlead.sections import BgpConfig

log = structlog.get_logger()

TABLE, PROTOCOL = 7470100, 171
"""The kernel table of announced addresses (`ip route show table 7470100`), and the protocol of its
routes."""
LOOK_S = 1.0
"""The interval at which the sessions are read."""
ANSWER_S = 3.0
"""The time within which BIRD must answer; the start of the gateway waits for it."""
MAX_PASSWORD = 80
"""The maximum length of a password (TCP_MD5SIG_MAXKEYLEN)."""


class BgpDriver(Component):
    """Driver of the announcements of one gateway. Call `open` first and `close` last, in the
    network namespace of the gateway. `shown`: returns the addresses in the status of all Services;
    none of them is withdrawn because its Service is not planned."""

    name = "bgp"

    def __init__(self, section: BgpConfig, *, shown: Callable[[], Set[str]] = frozenset) -> None:
        self._section = section
        self.shown = shown
        self._directory = Path(section.directory)
        self._file = self._directory / "bird.conf"
        self._bird = Bird(self._directory / "bird.ctl", timeout_s=ANSWER_S)
        self._kernel: Blackholes | None = None
        self._known: dict[ServiceKey, Spec] = {}
        self._unread = False
        """Whether BIRD has to read bird.conf again."""
        self._look = Look(problem="BIRD has not been asked yet")
        self._turn = asyncio.Lock()
        """Serializes `read` and `apply`, which share a socket to the kernel."""

    async def open(self) -> None:
        """Write the configuration of BIRD, and let BIRD read it if it has changed. Raise Refused if
        a password cannot be used, or the file cannot be written."""
        self._kernel = Blackholes(TABLE, PROTOCOL)
        self._unread = await asyncio.to_thread(self._write)
        await self._ask()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._ask()

    async def close(self) -> None:
        if self._kernel is not None:
            self._kernel.close()

    async def remove(self) -> list[str]:
        """Withdraw all addresses, and remove the configuration of BIRD. A BIRD that runs goes on
        without routes."""
        removed = await asyncio.to_thread(withdraw_all)
        with suppress(OSError):
            self._file.unlink()
            removed.append(str(self._file))
        return removed

    def render(self, intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, Spec]:
        """See `spec.render`."""
        return spec.render(intents)

    def diff(
        self, desired: Mapping[ServiceKey, Spec], actual: Mapping[ServiceKey, Spec]
    ) -> Sequence[Change]:
        """See `spec.diff`."""
        return spec.diff(desired, actual)

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Spec]:
        """Return what is announced. With None, compare with the kernel table, in which an earlier
        process may have left addresses that no Service has any more."""
        if keys is not None:
            return {key: self._known[key] for key in keys if key in self._known}
        assert self._kernel is not None
        async with self._turn:
            announced = await asyncio.to_thread(self._kernel.routes)
            self._known = spec.present(self._known, announced, self.shown())
            return self._known

    async def apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        """Carry out the changes. Raise Refused or Unavailable."""
        kernel = self._kernel
        assert kernel is not None
        async with self._turn:
            known = spec.carried_out(self._known, changes)
            wanted = {each for change in changes for each in change.wanted}
            left = {each for change in changes for each in change.before}
            gone = left - spec.addresses_of(known)
            await asyncio.to_thread(kernel.add_routes, sorted(wanted))
            await asyncio.to_thread(kernel.delete_routes, sorted(gone))
            self._known = known
        return {}

    def status(self) -> BgpState:
        return BgpState(len(self.addresses), sessions_of(self._section, self._look))

    def findings(self) -> Sequence[Finding]:
        return tuple(findings_of(self._section, self._look, self.addresses))

    def collectors(self) -> tuple[BgpCollector]:
        return (
            BgpCollector(
                lambda: sessions_of(self._section, self._look), lambda: len(self.addresses)
            ),
        )

    @property
    def addresses(self) -> Set[str]:
        """The addresses that this process announces."""
        return spec.addresses_of(self._known)

    async def _ask(self) -> None:
        """Let BIRD read its configuration if it has changed, and read the sessions."""
        before = self._look
        try:
            if self._unread:
                await self._bird.configure()
                self._unread = False
            look = Look(await self._bird.protocols(), await self._bird.bfd_sessions())
            if not is_configured(self._section, look):
                text = f"BIRD at {self._bird.path} runs with another configuration"
                look = look._replace(problem=text, refused=True)
        except FairleadError as error:
            look = Look(problem=str(error), refused=isinstance(error, Refused))
        self._look = look
        if look.problem and look.problem != before.problem:
            log.warning("addresses are not announced by BGP", problem=look.problem)

    def _write(self) -> bool:
        """Write bird.conf. Return whether it has changed."""
        passwords = {
            each.name: _password(Path(each.password_file))
            for each in self._section.routers
            if each.password_file
        }
        text = configuration(self._section, passwords, table=TABLE)
        file = self._file
        try:
            with suppress(FileNotFoundError):
                if file.read_text() == text:
                    return False
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Passwords are for root alone. BIRD may start meanwhile, so the file is always whole.
            draft = file.with_suffix(".new")
            with open(draft, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as new:
                new.write(text)
            draft.replace(file)
        except OSError as error:
            raise Refused(
                f"{file} cannot be written: {plain(error)}", fix="check announce.bgp.directory"
            ) from error
        return True


class NoBgp(Component):
    """The component of a gateway that announces nothing by BGP: it withdraws what an earlier
    configuration left. The configuration of BIRD stays, and has no effect without routes."""

    name = "no bgp"

    async def open(self) -> None:
        try:
            removed = await self.remove()
        except FairleadError as error:
            log.warning("what was announced by BGP before is not withdrawn", problem=str(error))
            return
        for what in removed:
            log.info("removed a part of the former announcement", part=what)

    async def remove(self) -> list[str]:
        return await asyncio.to_thread(withdraw_all)


def withdraw_all() -> list[str]:
    """Withdraw all addresses. Return a description of what was removed. Raise Unavailable or
    Refused."""
    with closing(Blackholes(TABLE, PROTOCOL)) as kernel:
        routes = kernel.routes()
        kernel.delete_routes(routes)
    return [f"routes announced by BGP ({len(routes)})"] if routes else []


def _password(file: Path) -> str:
    """Return the password in a file. Raise Refused if there is none that BIRD and TCP can use."""
    try:
        text = file.read_text().rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(
            f"the password of a BGP session cannot be read from {file}: {plain(error)}",
            fix="correct passwordFile in announce.bgp.routers",
        ) from error
    if not text or len(text) > MAX_PASSWORD or not text.isprintable() or not text.isascii():
        reason = f"it is not one line of 1 to {MAX_PASSWORD} printable ASCII characters"
    elif '"' in text:
        reason = 'it contains "'
    else:
        return text
    raise Refused(f"the password in {file} cannot be used: {reason}", fix="choose another one")
