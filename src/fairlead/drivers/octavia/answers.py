"""Answers of Octavia's API, with the fields that Fairlead reads, and the calls that read Octavia
and Neutron.

In: a Cloud and a path. Out: one object, or all pages of a list: both APIs return at most 1000
objects in one page. A field that the API may omit or set to null has a default. Any other answer,
such as the HTML page of an HTTP proxy in between, is Unavailable, which concerns the Service that
asked. Fields: Octavia API reference, version 2.30."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Protocol, TypeVar

import msgspec

from fairlead.drivers.octavia.cloud import Cloud, Params
from fairlead.drivers.octavia.failures import UNDECODABLE
from fairlead.drivers.octavia.paths import VERSIONS, url_of
from fairlead.errors import Unavailable, plain

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


class BalancerStatus(msgspec.Struct):
    provisioning_status: str


class Statuses(msgspec.Struct):
    loadbalancer: BalancerStatus


class StatusTree(msgspec.Struct):
    """The status of a load balancer and, in fields that are not read, of its children."""

    statuses: Statuses


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
    return decode_one(f"GET {url_of(path)}", body, type_)


async def get_versions(cloud: Cloud) -> Versions:
    return decode(f"GET {url_of(VERSIONS)}", await cloud.get(VERSIONS) or b"{}", Versions)


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
        request = f"GET {url_of(path)}"
        page = decode(request, body, dict[str, object]).get(name)
        items = _converted(request, page, list[type_])  # type: ignore[valid-type]
        found += items
        if len(items) < PAGE:
            return found


def decode_one(request: str, body: bytes, type_: type[AnyT]) -> AnyT:
    """Decode an answer with one object, which the API wraps in an object with its name, as in
    `{"loadbalancer": {...}}`. Raise Unavailable if the answer does not have this form."""
    one = Annotated[dict[str, type_], msgspec.Meta(min_length=1)]  # type: ignore[valid-type]
    found: dict[str, AnyT] = decode(request, body, one)
    return next(iter(found.values()))


def decode(request: str, body: bytes, type_: type[AnyT]) -> AnyT:
    """Decode the answer to `request`, such as `GET /lbaas/loadbalancers`. Raise Unavailable if it
    does not have the form of the API."""
    try:
        return msgspec.json.decode(body, type=type_)
    except UNDECODABLE as error:
        raise _undecodable(request, error) from error


def _converted(request: str, found: object, type_: type[AnyT]) -> AnyT:
    try:
        return msgspec.convert(found, type_)
    except msgspec.ValidationError as error:
        raise _undecodable(request, error) from error


def _undecodable(request: str, error: Exception) -> Unavailable:
    return Unavailable(
        f"{request}: the answer does not have the form of the API: {plain(error)}",
        fix="check that no HTTP proxy answers in place of the API",
    )
