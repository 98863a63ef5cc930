"""Settings of the host's kernel that do harm to what Fairlead does, found and, with consent, put
right.

In: `Need`s, which a role knows: a setting, which values do harm, and what harm. Out: `Finding`s,
for log and status; with consent the settings changed, and what they were before noted in a file, so
that `restore` can put them back. Invariants: nothing is written without consent; of a setting that
was changed twice the first value is remembered, and one that somebody else has changed since is
left as it is. Only needs whose harm a test shows with packets belong here, but for those whose harm
would be every namespace's on the machine (`direct.needs`, `nodeproxy.requirements`)."""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import msgspec
import structlog

from fairlead.drivers.need import Need
from fairlead.errors import Conflict, FairleadError
from fairlead.net import sysctl

log = structlog.get_logger()

DIRECTORY = Path("/run/fairlead/settings")
"""Until the next boot, as are the settings themselves."""


class Finding(msgspec.Struct, frozen=True):
    """A setting that does harm. `adjusted`: it is put right already; `value` is what it was."""

    setting: str
    value: str
    should: str
    why: str
    adjusted: bool = False

    @property
    def command(self) -> str:
        """What puts it right."""
        return sysctl.command(self.setting, self.should)


class _Change(msgspec.Struct, frozen=True):
    before: str
    after: str


def findings(
    needs: Iterable[Need], read: Callable[[str], str | None] = sysctl.read
) -> tuple[Finding, ...]:
    """The needs that are not met. A setting that is not there harms nobody."""
    values = ((need, read(need.setting)) for need in needs)
    return tuple(
        Finding(need.setting, value, need.should, need.why)
        for need, value in values
        if value is not None and need.harmful(value)
    )


class Host:
    """What one role makes of its host. `role` names the file in which changes are remembered, one
    in each network namespace."""

    def __init__(self, role: str, *, adjust: bool, directory: Path = DIRECTORY) -> None:
        self._adjust = adjust
        self._file = directory / f"{role}-{Path('/proc/thread-self/ns/net').stat().st_ino}"
        self._told: frozenset[Finding] = frozenset()
        self.findings: tuple[Finding, ...] = ()
        """As of the last `look`."""

    def look(self, needs: Collection[Need]) -> tuple[Finding, ...]:
        """Find what does harm now; with consent put it right. Each finding is logged once, with the
        command that mends it."""
        found = tuple(
            self._put_right(finding) if self._adjust else finding for finding in findings(needs)
        )
        for finding in found:
            if finding in self._told:
                continue
            if finding.adjusted:
                log.info(
                    "set",
                    setting=finding.setting,
                    value=finding.should,
                    was=finding.value,
                    why=finding.why,
                )
            else:
                log.warning(
                    "does harm",
                    setting=finding.setting,
                    value=finding.value,
                    why=finding.why,
                    fix=finding.command,
                )
        # What was put right is not found again: it stays shown, as long as somebody needs it.
        kept = [
            each
            for each in self.findings
            if each.adjusted and each.setting in {need.setting for need in needs}
        ]
        renewed = {each.setting for each in found}
        self._told = frozenset(found)
        self.findings = (*(each for each in kept if each.setting not in renewed), *found)
        return self.findings

    def restore(self) -> tuple[str, ...]:
        """Put back what was changed here, unless somebody else has set it since. The names of what
        was put back."""
        restored = []
        for setting, change in self._remembered().items():
            if sysctl.read(setting) != change.after:
                continue
            sysctl.write(setting, change.before)
            restored.append(setting)
        self._file.unlink(missing_ok=True)
        return tuple(restored)

    def _put_right(self, finding: Finding) -> Finding:
        try:
            self._remember(finding)
            sysctl.write(finding.setting, finding.should)
        except Conflict:  # the interface went away
            return finding
        except FairleadError as problem:
            log.warning("cannot be set", setting=finding.setting, problem=str(problem))
            return finding
        return msgspec.structs.replace(finding, adjusted=True)

    def _remember(self, finding: Finding) -> None:
        """Before it is changed: a process that is killed between the two has changed nothing that
        is not noted."""
        known = self._remembered()
        before = known[finding.setting].before if finding.setting in known else finding.value
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_bytes(
            msgspec.json.encode(known | {finding.setting: _Change(before, finding.should)})
        )

    def _remembered(self) -> dict[str, _Change]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, _Change])
        except (FileNotFoundError, msgspec.DecodeError):
            return {}
