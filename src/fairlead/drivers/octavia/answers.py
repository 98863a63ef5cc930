"""Answers of Octavia's API, with the fields that Fairlead reads, and the calls that read Octavia
and Neutron.

In: a Cloud and a path. Out: one object, or all pages of a list: both APIs return at most 1000
objects in one page. A field that the API may omit or set to null has a default. Fields: Octavia API
reference, version 2.30."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol, TypeVar

import msgspec

from fairlead.drivers.octavia.cloud import Cloud, Params
from fairlead.drivers.octavia.paths import VERSIONS, url_of
from fairlead.errors import Unavailable

PAGE = 1000
NOTHING: Params = MappingProxyType({})


class Id(msgspec.Struct):
    id: str


class AdditionalVip(msgspec.Struct):
    ip_address: str = ""
    subnet_id: str | None = None


class Version(msgspec.Struct):
    id: str


class Versions(msgspec.Struct):
    """The versions of the API."""

    versions: tuple[Version, ...] = ()

    @property
    def newest(self) -> tuple[int, ...]:
        """The newest version, for example (2, 30); () if no version is listed."""
        texts = [each.id.removeprefix("v") for each in self.versions]
        return max(
            (
                tuple(map(int, text.split(".")))
                for text in texts
                if text.replace(".", "").isdecimal()
            ),
            default=(),
        )


class Balancer(msgspec.Struct):
    id: str
    provisioning_status: str
    operating_status: str = ""
    provider: str = ""
    vip_address: str | None = None
    vip_port_id: str | None = None
    vip_subnet_id: str | None = None
    additional_vips: tuple[AdditionalVip, ...] = ()
    name: str = ""
    description: str | None = None
    tags: tuple[str, ...] = ()
    created_at: str | None = None
    listeners: tuple[Id, ...] = ()


class Listener(msgspec.Struct):
    id: str
    provisioning_status: str
    protocol: str
    protocol_port: int
    name: str | None = None
    loadbalancers: tuple[Id, ...] = ()
    default_pool_id: str | None = None
    connection_limit: int | None = None
    timeout_client_data: int | None = None
    timeout_member_connect: int | None = None
    timeout_member_data: int | None = None
    timeout_tcp_inspect: int | None = None
    allowed_cidrs: tuple[str, ...] | None = None
    insert_headers: Mapping[str, str] | None = None
    tags: tuple[str, ...] = ()


class Persistence(msgspec.Struct):
    type: str
    persistence_timeout: int | None = None


class Pool(msgspec.Struct):
    id: str
    provisioning_status: str
    protocol: str
    lb_algorithm: str
    name: str | None = None
    loadbalancers: tuple[Id, ...] = ()
    members: tuple[Id, ...] = ()
    healthmonitor_id: str | None = None
    session_persistence: Persistence | None = None
    tags: tuple[str, ...] = ()


class Monitor(msgspec.Struct):
    id: str
    provisioning_status: str
    type: str
    delay: int
    timeout: int
    max_retries: int
    max_retries_down: int = 3
    url_path: str | None = None
    pools: tuple[Id, ...] = ()
    tags: tuple[str, ...] = ()


class Member(msgspec.Struct):
    id: str
    provisioning_status: str
    address: str
    protocol_port: int
    operating_status: str = ""
    weight: int | None = 1
    monitor_port: int | None = None
    subnet_id: str | None = None


class Item(Protocol):
    @property
    def id(self) -> str: ...


ItemT = TypeVar("ItemT", bound=Item)
AnyT = TypeVar("AnyT")


async def get_one(cloud: Cloud, path: str, type_: type[ItemT]) -> ItemT | None:
    """Return the object at `path`, or None if it does not exist."""
    body = await cloud.get(path)
    if body is None:
        return None
    found = _decoded(path, body, dict[str, type_])  # type: ignore[valid-type]
    return next(iter(found.values()))


async def get_versions(cloud: Cloud) -> Versions:
    return _decoded(VERSIONS, await cloud.get(VERSIONS) or b"{}", Versions)


async def get_list(
    cloud: Cloud, path: str, type_: type[ItemT], of: Params = NOTHING
) -> list[ItemT]:
    """Return the objects of all pages of the list at `path`."""
    name = path.rpartition("/")[2].replace("-", "_")
    found: list[ItemT] = []
    while True:
        params: Params = {"limit": str(PAGE), **of} | ({"marker": found[-1].id} if found else {})
        body = await cloud.get(path, params)
        if body is None:
            return found  # the parent object was deleted meanwhile
        page = _decoded(path, body, dict[str, object]).get(name)
        items = _converted(path, page, list[type_])  # type: ignore[valid-type]
        found += items
        if len(items) < PAGE:
            return found


def _decoded(path: str, body: bytes, type_: type[AnyT]) -> AnyT:
    """Decode an answer. Raise Unavailable if it does not have the form of the API."""
    try:
        return msgspec.json.decode(body, type=type_)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Unavailable(f"GET {url_of(path)}: the answer cannot be decoded: {error}") from error


def _converted(path: str, found: object, type_: type[AnyT]) -> AnyT:
    try:
        return msgspec.convert(found, type_)
    except msgspec.ValidationError as error:
        raise Unavailable(f"GET {url_of(path)}: the answer cannot be decoded: {error}") from error
