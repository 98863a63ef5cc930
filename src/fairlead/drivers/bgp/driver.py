"""The driver that announces the addresses of Services by BGP.

In: LoadBalancers. Out: a route in a kernel table of its own for each of their addresses, which BIRD
reads and announces. BIRD is a process of its own on the host: it outlives this one, and is started
by the operator with the configuration that this driver writes. It is the last driver of its chain,
and its part `Withdrawals` the first: an address is announced after the other drivers serve the
Service, and withdrawn before they stop.

Invariants: what is announced is what the kernel table has. A restart of this process, and an API
server that is away, change nothing; after a boot the table is empty, so nothing is announced before
this gateway serves it. No packet is looked up in the table. BIRD reads bird.conf when a process
starts and when it has changed: some changes reset sessions, and an equal text resets none."""

import asyncio
import os
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import closing, suppress
from pathlib import Path

import structlog

from fairlead.drivers import Component
from fairlead.drivers.bgp import spec
from fairlead.drivers.bgp.metrics import BgpCollector
from fairlead.drivers.bgp.render import HEADER, configuration
from fairlead.drivers.bgp.sessions import (
    ESTABLISHED,
    Look,
    findings_of,
    is_configured,
    sessions_of,
)
from fairlead.drivers.bgp.spec import Change, Spec
from fairlead.errors import FairleadError, Refused, plain
from fairlead.model import Family, Finding, LoadBalancer, Outcome, ServiceKey
from fairlead.net.address import family_of
from fairlead.net.bird import Bird
from fairlead.net.blackhole import Blackholes
from fairlead.role_state import BgpState
from fairlead.sections import BIRD_DIRECTORY, BgpConfig

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
    network namespace of the gateway. `shown`: returns the addresses in the status of the Services
    whose plan is refused; none of them is withdrawn because its Service is not planned."""

    name = "bgp"

    def __init__(self, section: BgpConfig, *, shown: Callable[[], Set[str]] = frozenset) -> None:
        self._section = section
        self.shown = shown
        self._directory = Path(section.directory)
        self._file = self._directory / "bird.conf"
        self._bird = Bird(self._directory / "bird.ctl", timeout_s=ANSWER_S)
        self._kernel: Blackholes | None = None
        self._known: dict[ServiceKey, Spec] = {}
        self._unread = True
        """Whether BIRD has to read bird.conf again. An earlier process may have ended between its
        write and the answer of BIRD, and an equal configuration changes nothing in BIRD."""
        self._unwritten = ""
        """Why bird.conf is not that of the section; it is written again until it is."""
        self._look = Look(problem="BIRD has not been asked yet")
        self._families: frozenset[Family] = frozenset()
        """The families of the addresses that were announced when BIRD was asked last."""
        self._turn = asyncio.Lock()
        """Serializes `read` and `apply`, which share a socket to the kernel."""

    async def open(self) -> None:
        """Write the configuration of BIRD, and let BIRD read it. If a password cannot be used, or
        the file cannot be written, BIRD goes on with the previous file, and a finding says so."""
        self._kernel = Blackholes(TABLE, PROTOCOL)
        await asyncio.to_thread(self._write)
        await self._ask()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self._unwritten:
                await asyncio.to_thread(self._write)
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
        return tuple(findings_of(self._section, self._look))

    def collectors(self) -> tuple[BgpCollector]:
        return (
            BgpCollector(
                lambda: sessions_of(self._section, self._look), lambda: len(self.addresses)
            ),
        )

    @property
    def withdrawals(self) -> "Withdrawals":
        """The driver that withdraws addresses before other drivers stop serving them."""
        return Withdrawals(self)

    @property
    def addresses(self) -> Set[str]:
        """The addresses that this process announces."""
        return spec.addresses_of(self._known)

    async def _ask(self) -> None:
        """Let BIRD read its configuration if it has changed, and read the sessions."""
        before = self._look
        wrong = self._unwritten
        # What was announced before the previous answer has reached BIRD by now.
        families, self._families = self._families, frozenset(map(family_of, self.addresses))
        try:
            if self._unread and not wrong:
                try:
                    await self._bird.configure()
                    self._unread = False
                except Refused as error:
                    wrong = str(error)
            look = Look(await self._bird.protocols(), await self._bird.bfd_sessions())
            if not wrong and not is_configured(self._section, look):
                wrong = f"BIRD at {self._bird.path} runs with another configuration"
            look = look._replace(problem=wrong, refused=bool(wrong))
        except FairleadError as error:
            look = Look(problem=wrong or str(error), refused=bool(wrong))
        self._look = look._replace(families=families & self._families)
        if look.problem and look.problem != before.problem:
            log.warning("BIRD does not announce what is configured", problem=look.problem)
        for was, now in zip(
            sessions_of(self._section, before), sessions_of(self._section, look), strict=True
        ):
            if (was.state == ESTABLISHED) != (now.state == ESTABLISHED):
                (log.info if now.state == ESTABLISHED else log.warning)(
                    "the session with a router has changed",
                    router=now.router,
                    state=now.state,
                    before=was.state,
                    last_error=now.last_error,
                )

    def _write(self) -> None:
        """Write bird.conf, if it differs."""
        try:
            self._unread |= self._replace_file()
            self._unwritten = ""
        except Refused as error:
            self._unwritten = str(error)

    def _replace_file(self) -> bool:
        """Write bird.conf. Return whether it has changed. Raise Refused."""
        passwords = {
            each.name: _password(Path(each.password_file))
            for each in self._section.routers
            if each.password_file
        }
        text = configuration(self._section, passwords, table=TABLE).encode()
        file = self._file
        try:
            with suppress(FileNotFoundError):
                if file.read_bytes() == text:
                    file.chmod(0o600)
                    return False
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Passwords are for root alone. BIRD may start meanwhile, so the file is always whole.
            draft = file.with_suffix(".new")
            draft.unlink(missing_ok=True)
            with open(draft, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as new:
                new.write(text)
            draft.replace(file)
        except OSError as error:
            raise Refused(
                f"{file} cannot be written: {plain(error)}", fix="check announce.bgp.directory"
            ) from error
        return True


class Withdrawals(Component):
    """The part of the driver that comes first in its chain: it withdraws the addresses that a
    Service does not have any more, before the next drivers stop serving them. A Service that is
    removed passes the chain in reverse order, so nothing is left for this part then."""

    name = "bgp withdrawals"

    def __init__(self, driver: BgpDriver) -> None:
        self.render, self.read, self.apply = driver.render, driver.read, driver.apply

    def diff(
        self, desired: Mapping[ServiceKey, Spec], actual: Mapping[ServiceKey, Spec]
    ) -> Sequence[Change]:
        """See `spec.withdrawn`."""
        return spec.withdrawn(desired, actual)


class NoBgp(Component):
    """The component of a gateway that announces nothing by BGP: it withdraws what an earlier
    configuration left, and removes the configuration of BIRD, which may contain passwords.
    `directory`: where this is; a file that Fairlead has not written stays."""

    name = "no bgp"

    def __init__(self, directory: Path = Path(BIRD_DIRECTORY)) -> None:
        self._file = directory / "bird.conf"

    async def open(self) -> None:
        try:
            removed = await self.remove()
        except FairleadError as error:
            log.warning("what was announced by BGP before is not withdrawn", problem=str(error))
            return
        for what in removed:
            log.info("removed a part of the former announcement", part=what)

    async def remove(self) -> list[str]:
        removed = await asyncio.to_thread(withdraw_all)
        with suppress(OSError):
            if self._file.read_bytes().startswith(HEADER.encode()):
                self._file.unlink()
                removed.append(str(self._file))
        return removed


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
