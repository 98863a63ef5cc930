"""Rows of others at the same routers and switches: which of them has an address and port already.

In: rows of table Load_Balancer that carry no mark of this cluster. Out: for each key of their
`vips` the row and its owner. Pure. The router gets the flows of every row, and OVN does not define
which row wins, so an address and port that another row has is refused."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from fairlead.drivers.ovn.marks import CLUSTER, SERVICE
from fairlead.drivers.ovn.spec import NAME_PREFIX, Attachment, Frontend, endpoint_text
from fairlead.errors import Refused
from fairlead.model import Finding
from fairlead.net.address import canonical, numeric_host, split_host_port

ADDRESS_CONFLICT = "OvnAddressConflict"
"""Code of a Finding: another program has attached a row with an address and port in use."""
KUBERNETES = "k8s.ovn.org/"
"""The prefix of the keys by which OVN-Kubernetes marks its rows."""
_OWNERS = (
    (f"{KUBERNETES}owner", "OVN-Kubernetes"),
    (f"{KUBERNETES}kind", "OVN-Kubernetes"),
    ("neutron:vip", "the Octavia provider of OVN"),
    ("ls_refs", "the Octavia provider of OVN"),
    ("lr_ref", "the Octavia provider of OVN"),
    ("vendor", "Kube-OVN"),
)
"""Keys of external_ids, and the program that writes them."""


class ForeignRow(msgspec.Struct, frozen=True):
    """A row that is not of this cluster. `vips`: the keys of the column, with canonical
    addresses."""

    uuid: str
    name: str
    protocol: str
    vips: tuple[str, ...]
    external_ids: Mapping[str, str]

    @property
    def has_whole_addresses(self) -> bool:
        """Whether the row may have an address with every port."""
        return any(numeric_host(each) is None for each in self.vips)

    @property
    def owner(self) -> str:
        """Who made the row, as far as its marks show."""
        if cluster := self.external_ids.get(CLUSTER):
            return f"Service {self.external_ids.get(SERVICE, '')} of Fairlead cluster {cluster}"
        for key, program in _OWNERS:
            if key in self.external_ids:
                return f"{program} ({key}={self.external_ids[key]})"
        if self.name.startswith(NAME_PREFIX):
            return f"a Service of Fairlead, but another program has removed the mark {CLUSTER}"
        return "unknown, because the row has no known mark"


COLUMNS = ("_uuid", "name", "protocol", "vips", "external_ids")


def read_foreign(values: Mapping[str, Any]) -> ForeignRow:
    """Return the row with these values of `COLUMNS`."""
    return ForeignRow(
        values["_uuid"],
        values["name"],
        values["protocol"] or "tcp",
        tuple(map(_canonical_vip, values["vips"])),
        values["external_ids"],
    )


def _canonical_vip(text: str) -> str:
    """Return a key of `vips`, an address with or without a port, with its address in the canonical
    form. A text that is neither is returned as it is."""
    with suppress(OSError, ValueError):
        return canonical(text.removeprefix("[").removesuffix("]"))
    with suppress(OSError, ValueError):
        address, port = split_host_port(text)
        return endpoint_text(canonical(address), port)
    return text


def holder(rows: Iterable[ForeignRow], frontend: Frontend) -> ForeignRow | None:
    """Return the row that has this address and port, or the whole address; None if none has."""
    for row in rows:
        if frontend.address in row.vips:
            return row
        if row.protocol == frontend.protocol.lower() and frontend.vip in row.vips:
            return row
    return None


def taken(frontend: Frontend, row: ForeignRow, place: Attachment) -> Refused:
    """Return the refusal of an address and port that another row has."""
    return Refused(
        f"{place} has another load balancer for {frontend.vip}/{frontend.protocol}: row "
        f"{row.name or row.uuid} ({row.uuid}), owner {row.owner}",
        fix="request another address, or delete that load balancer where it was made",
    )


def conflict(frontend: Frontend, row: ForeignRow, place: Attachment) -> Finding:
    """Return the Finding that a row of others has an address and port of a Service."""
    return Finding(
        ADDRESS_CONFLICT,
        f"{place} now has another load balancer for {frontend.vip}/{frontend.protocol}: row "
        f"{row.name or row.uuid} ({row.uuid}), owner {row.owner}; OVN does not define which of the "
        "two gets the connections",
        remedy="delete that load balancer where it was made",
    )
