"""Settings of the host's kernel that do harm to what Fairlead does, found and, with consent, put
right.

In: `Need`s, which a role knows: a setting, which values do harm, and what harm. Out: a `Finding`
for each setting that does harm, for log and status; with consent the settings changed, and their
earlier values recorded in a file, so that `restore` can put them back. Invariants: nothing is
written without consent; of a setting that was changed twice the first value is remembered, and one
that somebody else has changed since is left as it is. Only needs whose harm a test shows with
packets belong here, but for those whose harm would be every namespace's on the machine
(`direct.needs`, `nodeproxy.requirements`)."""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from fairlead.drivers.need import Need
from fairlead.errors import Conflict, FairleadError
from fairlead.model import Finding
from fairlead.net import sysctl

log = structlog.get_logger()

SETTING_HARMFUL = "HostSettingHarmful"
SETTING_ADJUSTED = "HostSettingAdjusted"
"""Codes of Findings: a setting of the host does harm; it did, and was set to another value."""

DIRECTORY = Path("/run/fairlead/settings")
"""Until the next boot, as are the settings themselves."""


class HarmfulSetting(NamedTuple):
    """A Need that is not met, and the value that the setting has, or had before it was
    `adjusted`."""

    need: Need
    value: str
    adjusted: bool = False

    @property
    def finding(self) -> Finding:
        """The same, for log and status."""
        setting, should, why = self.need.setting, self.need.should, self.need.why
        if self.adjusted:
            message = f"{setting} was {self.value}, set to {should}: {why}"
            return Finding(SETTING_ADJUSTED, message, severity="info", subject=_subject(setting))
        return Finding(
            SETTING_HARMFUL,
            f"{setting} is {self.value}, should be {should}: {why}",
            subject=_subject(setting),
            remedy=sysctl.command(setting, should),
        )


def _subject(setting: str) -> str:
    return f"sysctl {setting}"


class _Change(msgspec.Struct, frozen=True):
    before: str
    after: str


def harmful_settings(
    needs: Iterable[Need], read: Callable[[str], str | None] = sysctl.read
) -> tuple[HarmfulSetting, ...]:
    """The needs that are not met. A setting that does not exist does no harm."""
    values = ((need, read(need.setting)) for need in needs)
    return tuple(
        HarmfulSetting(need, value)
        for need, value in values
        if value is not None and need.harmful(value)
    )


class Host:
    """What one role makes of its host. `role` names the file in which changes are remembered, one
    in each network namespace."""

    def __init__(self, role: str, *, adjust: bool, directory: Path = DIRECTORY) -> None:
        self._adjust = adjust
        self._file = directory / f"{role}-{Path('/proc/thread-self/ns/net').stat().st_ino}"
        self._logged: frozenset[Finding] = frozenset()
        self._shown: tuple[HarmfulSetting, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """As of the last `check`."""
        return tuple(each.finding for each in self._shown)

    def check(self, needs: Collection[Need]) -> tuple[Finding, ...]:
        """Find what does harm now; with consent put it right. Each finding is logged once, with the
        command that mends it."""
        found = tuple(
            self._apply_value(each) if self._adjust else each for each in harmful_settings(needs)
        )
        for each in found:
            if each.finding in self._logged:
                continue
            setting, why = each.need.setting, each.need.why
            if each.adjusted:
                log.info("set", setting=setting, value=each.need.should, was=each.value, why=why)
            else:
                log.warning(
                    "does harm",
                    setting=setting,
                    value=each.value,
                    why=why,
                    fix=each.finding.remedy,
                )
        # What was put right is not found again: it stays shown, as long as somebody needs it.
        kept = [
            each
            for each in self._shown
            if each.adjusted and each.need.setting in {need.setting for need in needs}
        ]
        renewed = {each.need.setting for each in found}
        self._logged = frozenset(each.finding for each in found)
        self._shown = (*(each for each in kept if each.need.setting not in renewed), *found)
        return self.findings

    def restore(self) -> tuple[str, ...]:
        """Put back what was changed here, unless somebody else has set it since. The names of what
        was put back."""
        restored = []
        for setting, change in self._recorded().items():
            if sysctl.read(setting) != change.after:
                continue
            sysctl.write(setting, change.before)
            restored.append(setting)
        self._file.unlink(missing_ok=True)
        return tuple(restored)

    def _apply_value(self, found: HarmfulSetting) -> HarmfulSetting:
        setting = found.need.setting
        try:
            self._record(found)
            sysctl.write(setting, found.need.should)
        except Conflict:  # the interface went away
            return found
        except FairleadError as problem:
            log.warning("cannot be set", setting=setting, problem=str(problem))
            return found
        return found._replace(adjusted=True)

    def _record(self, found: HarmfulSetting) -> None:
        """Before it is changed: a process that is killed between the two has changed nothing that
        is not noted."""
        known, setting = self._recorded(), found.need.setting
        before = known[setting].before if setting in known else found.value
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_bytes(
            msgspec.json.encode(known | {setting: _Change(before, found.need.should)})
        )

    def _recorded(self) -> dict[str, _Change]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, _Change])
        except (FileNotFoundError, msgspec.DecodeError):
            return {}
