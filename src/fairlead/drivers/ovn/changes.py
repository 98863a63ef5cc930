"""The steps of the driver of OVN. Each prints as the ovn-nbctl command that it stands for. Pure."""

import shlex
from collections.abc import Iterator, Mapping

import msgspec

from fairlead.drivers.ovn.spec import Attachment, Columns, Frontend
from fairlead.model import Outcome, ServiceKey
from fairlead.net.ovsdb.operations import new_uuid

_ATTACH = {"Logical_Router": "lr-lb-add", "Logical_Switch": "ls-lb-add"}


class CreateRow(msgspec.Struct, frozen=True):
    """Create a row, attached to these routers and switches from the beginning. `uuid` is random, so
    it differs from that of any row that was made for the Service before."""

    service: ServiceKey
    frontend: Frontend
    columns: Columns
    attachments: tuple[Attachment, ...]
    uuid: str = msgspec.field(default_factory=new_uuid)

    def __str__(self) -> str:
        name, vip = self.columns.name, self.frontend.vip
        settings = [*_settings("options", self.columns.options)]
        settings += _settings("external_ids", self.columns.external_ids)
        parts = [
            _words("lb-add", name, vip, self.columns.vips[vip], self.columns.protocol),
            _words("set", "load_balancer", name, *settings),
            *(_words(_ATTACH[each.table], each.name, name) for each in self.attachments),
        ]
        return f"ovn-nbctl {' -- '.join(parts)}"


class UpdateRow(msgspec.Struct, frozen=True):
    """Change columns of a row. `before`: the columns that the change was computed from; the change
    is not made if another writer has changed `vips` since."""

    service: ServiceKey
    uuid: str
    before: Columns
    columns: Columns

    def __str__(self) -> str:
        parts = list(self._parts())
        return f"ovn-nbctl {' -- '.join(parts)}"

    def _parts(self) -> Iterator[str]:
        settings: list[str] = []
        if self.before.name != self.columns.name:
            settings.append(f"name={self.columns.name}")
        for column in ("vips", "options", "external_ids"):
            old: Mapping[str, str] = getattr(self.before, column)
            new: Mapping[str, str] = getattr(self.columns, column)
            changed = {key: text for key, text in new.items() if old.get(key) != text}
            settings += _settings(column, changed)
            if gone := [_quoted(key) for key in old if key not in new]:
                yield _words("remove", "load_balancer", self.uuid, column, *gone)
        if settings:
            yield _words("set", "load_balancer", self.uuid, *settings)


class AttachRow(msgspec.Struct, frozen=True):
    """Attach a row to a router or switch."""

    service: ServiceKey
    uuid: str
    attachment: Attachment

    def __str__(self) -> str:
        name = self.attachment.name
        return f"ovn-nbctl {_words(_ATTACH[self.attachment.table], name, self.uuid)}"


class DeleteRow(msgspec.Struct, frozen=True):
    """Delete a row. Its open connections end."""

    service: ServiceKey
    uuid: str

    def __str__(self) -> str:
        return f"ovn-nbctl {_words('lb-del', self.uuid)}"


class AwaitFlows(msgspec.Struct, frozen=True):
    """Wait until every chassis has installed the rows of the Service."""

    service: ServiceKey

    def __str__(self) -> str:
        return "ovn-nbctl --wait=hv sync"


class Blocked(msgspec.Struct, frozen=True):
    """No row of the Service can be created or attached at present; if the database is not
    connected, nothing can be written. `outcome` has the reason."""

    service: ServiceKey
    outcome: Outcome

    def __str__(self) -> str:
        return f"no new row for Service {self.service}: {self.outcome.message}"


class Report(msgspec.Struct, frozen=True):
    """Report what was found about the rows of the Service."""

    service: ServiceKey

    def __str__(self) -> str:
        return f"report another load balancer at an address of Service {self.service}"


Write = CreateRow | UpdateRow | AttachRow | DeleteRow
Change = Write | AwaitFlows | Blocked | Report


def is_appearance(change: Change) -> bool:
    """Return whether a row is new at a router or switch after the change."""
    return isinstance(change, CreateRow | AttachRow)


def _settings(column: str, entries: Mapping[str, str]) -> list[str]:
    return [f"{column}:{_quoted(key)}={_quoted(text)}" for key, text in entries.items()]


def _quoted(text: str) -> str:
    return f'"{text}"'


def _words(*words: str) -> str:
    return shlex.join(words)
