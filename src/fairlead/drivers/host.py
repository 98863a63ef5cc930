"""Finds settings of the host's kernel that harm what Fairlead does, and corrects them if the
configuration allows it.

In: the `SysctlRequirement`s of a role: a setting, the values that do harm, and the harm. Out: a
`Finding` for each harmful setting, for log and status; if allowed, the settings are changed and
their earlier values recorded in a file, so that `restore` can write them back. Invariants: without
permission nothing is written. If a setting was changed twice, the first value is recorded. A
setting that another program has changed since is not restored. A requirement is added only if a
test shows the harm with packets, except where the harm would reach every namespace of the test
machine (`direct.host_network.requirements`, `nodeproxy.requirements`)."""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from fairlead.drivers.sysctl_requirement import SysctlRequirement
from fairlead.errors import Conflict, FairleadError
from fairlead.model import Finding
from fairlead.net import sysctl

log = structlog.get_logger()

SETTING_HARMFUL = "HostSettingHarmful"
SETTING_ADJUSTED = "HostSettingAdjusted"
"""Codes of Findings: a setting does harm; a setting did harm and was set to another value."""

DIRECTORY = Path("/run/fairlead/settings")
"""A directory that, like the settings themselves, lasts until the next boot."""


class HarmfulSetting(NamedTuple):
    """An unmet SysctlRequirement, with the value that the setting has, or had before it was
    `adjusted`."""

    requirement: SysctlRequirement
    value: str
    adjusted: bool = False

    @property
    def finding(self) -> Finding:
        """The Finding for log and status."""
        setting, recommended, why = (
            self.requirement.setting,
            self.requirement.recommended,
            self.requirement.why,
        )
        if self.adjusted:
            message = f"{setting} was {self.value}, set to {recommended}: {why}"
            return Finding(SETTING_ADJUSTED, message, severity="info", subject=_subject(setting))
        return Finding(
            SETTING_HARMFUL,
            f"{setting} is {self.value}, should be {recommended}: {why}",
            subject=_subject(setting),
            remedy=sysctl.command(setting, recommended),
        )


def _subject(setting: str) -> str:
    return f"sysctl {setting}"


class _Change(msgspec.Struct, frozen=True):
    before: str
    after: str


def harmful_settings(
    requirements: Iterable[SysctlRequirement], read: Callable[[str], str | None] = sysctl.read
) -> tuple[HarmfulSetting, ...]:
    """Return the requirements that are not met. A setting that does not exist does no harm."""
    values = ((each, read(each.setting)) for each in requirements)
    return tuple(
        HarmfulSetting(each, value)
        for each, value in values
        if value is not None and each.harmful(value)
    )


class Host:
    """The kernel settings of the host, as one role needs them. `role` names the file in which
    changes are recorded; each network namespace has its own file."""

    def __init__(self, role: str, *, adjust: bool, directory: Path = DIRECTORY) -> None:
        self._adjust = adjust
        self._file = directory / f"{role}-{Path('/proc/thread-self/ns/net').stat().st_ino}"
        self._logged: frozenset[Finding] = frozenset()
        self._shown: tuple[HarmfulSetting, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of the last `check`."""
        return tuple(each.finding for each in self._shown)

    def check(self, requirements: Collection[SysctlRequirement]) -> tuple[Finding, ...]:
        """Find the settings that do harm now, and correct them if that is allowed. Each finding is
        logged once, with the command that corrects it."""
        found = tuple(
            self._apply_value(each) if self._adjust else each
            for each in harmful_settings(requirements)
        )
        for each in found:
            if each.finding in self._logged:
                continue
            setting, why = each.requirement.setting, each.requirement.why
            if each.adjusted:
                log.info(
                    "setting corrected",
                    setting=setting,
                    value=each.requirement.recommended,
                    was=each.value,
                    why=why,
                )
            else:
                log.warning(
                    "setting does harm",
                    setting=setting,
                    value=each.value,
                    why=why,
                    fix=each.finding.remedy,
                )
        # A corrected setting is not found again. It stays in the findings while a component needs
        # it.
        required = {each.setting for each in requirements}
        kept = [
            each for each in self._shown if each.adjusted and each.requirement.setting in required
        ]
        renewed = {each.requirement.setting for each in found}
        self._logged = frozenset(each.finding for each in found)
        self._shown = (*(each for each in kept if each.requirement.setting not in renewed), *found)
        return self.findings

    def restore(self) -> tuple[str, ...]:
        """Write back the earlier values of changed settings, except for settings that another
        program has changed since. Return the names of the restored settings."""
        restored = []
        for setting, change in self._recorded().items():
            if sysctl.read(setting) != change.after:
                continue
            sysctl.write(setting, change.before)
            restored.append(setting)
        self._file.unlink(missing_ok=True)
        return tuple(restored)

    def _apply_value(self, found: HarmfulSetting) -> HarmfulSetting:
        setting = found.requirement.setting
        try:
            self._record(found)
            sysctl.write(setting, found.requirement.recommended)
        except Conflict:  # the interface went away
            return found
        except FairleadError as problem:
            log.warning("setting cannot be changed", setting=setting, problem=str(problem))
            return found
        return found._replace(adjusted=True)

    def _record(self, found: HarmfulSetting) -> None:
        """Record the change before it is made, so that a process killed in between leaves no
        unrecorded change."""
        known, setting = self._recorded(), found.requirement.setting
        before = known[setting].before if setting in known else found.value
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_bytes(
            msgspec.json.encode(known | {setting: _Change(before, found.requirement.recommended)})
        )

    def _recorded(self) -> dict[str, _Change]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, _Change])
        except (FileNotFoundError, msgspec.DecodeError):
            return {}
