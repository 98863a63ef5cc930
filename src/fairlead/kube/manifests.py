"""Read Kubernetes objects from manifests instead of an API server.

In: files, folders (all *.yaml, *.yml and *.json below them, sorted by name) or `-` for standard
input; YAML or JSON, several documents per file, Lists. Out: typed objects of the kinds that the
plan uses, or the untyped documents. Invariants: documents are read as kubectl reads them, and a
Service gets what the API server would add to it; a document that cannot be read does not hide the
others, and is reported with its file, number, line and reason; objects of other kinds are counted
and not examined; a namespaced object without a namespace is in `default`, as with kubectl."""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from fairlead.errors import Refused, plain
from fairlead.kube.crds import ADDRESS_GRANTS, ADDRESS_POOLS, AddressGrant, AddressPool
from fairlead.kube.documents import read_contents
from fairlead.kube.mirrored import awaiting, is_mirrored, mirrors
from fairlead.kube.objects import (
    CONFIG_MAPS,
    CONFIGURATION,
    CONFIGURATION_FILE,
    ENDPOINT_SLICES,
    ENDPOINTS,
    NAMESPACES,
    NODES,
    SERVICES,
    EndpointSlice,
    Namespace,
    Node,
    Resource,
    Service,
)
from fairlead.kube.rules.types import complaint, without_nulls
from fairlead.kube.submission import Submission, families_of_cluster, submit
from fairlead.kube.written import refusal, remarks
from fairlead.model import ServiceKey

SUFFIXES = frozenset((".yaml", ".yml", ".json"))


class Document(msgspec.Struct, frozen=True):
    """One object as it was written. `place` is its file, document and line, for messages."""

    place: str
    object: Mapping[str, Any]

    @property
    def kind(self) -> tuple[str, str]:
        """The apiVersion and kind of the object."""
        return self.object["apiVersion"], self.object["kind"]


class LeftOut(msgspec.Struct, frozen=True):
    """A part of the manifests that has no effect. `is_error`: it should be read and cannot be; if
    not, kubectl ignores it in silence."""

    place: str
    reason: str
    is_error: bool = True

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class Manifests(msgspec.Struct, frozen=True):
    """The objects that were read. `services`: as the API server would store them. `submissions`:
    what it would make of each Service, also of those that it would refuse; empty if the objects
    come from a server. `left_out`: what could not be read. `ignored` counts the objects of other
    kinds, by kind."""

    services: tuple[Service, ...] = ()
    endpoint_slices: tuple[EndpointSlice, ...] = ()
    nodes: tuple[Node, ...] = ()
    namespaces: tuple[Namespace, ...] = ()
    address_pools: tuple[AddressPool, ...] = ()
    address_grants: tuple[AddressGrant, ...] = ()
    submissions: Mapping[ServiceKey, Submission] = msgspec.field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()
    ignored: Mapping[str, int] = msgspec.field(default_factory=dict)

    @property
    def left_out_errors(self) -> Sequence[LeftOut]:
        """What should have been read and could not be."""
        return [each for each in self.left_out if each.is_error]


KINDS: Sequence[Resource[Any]] = (
    SERVICES,
    ENDPOINT_SLICES,
    ENDPOINTS,
    NODES,
    NAMESPACES,
    ADDRESS_POOLS,
    ADDRESS_GRANTS,
)


NOT_MIRRORED = (
    "these Endpoints are not read: the control plane mirrors into EndpointSlices only those of a "
    "Service of the same name without a selector, which do not have the label "
    "endpointslice.kubernetes.io/skip-mirror"
)


def manifests_of(
    scanned: Iterable[Document | LeftOut], service_cidrs: Sequence[str] = ()
) -> Manifests:
    """Return all objects among these documents that the plan uses. `service_cidrs`: the configured
    ranges of ClusterIPs, if any."""
    resources = {(each.group_version, each.kind): each for each in KINDS}
    found: dict[str, list[Any]] = {each.kind: [] for each in KINDS}
    ignored: Counter[str] = Counter()
    left_out: list[LeftOut] = []
    seen: dict[tuple[str, str, str], str] = {}
    for document in scanned:
        if isinstance(document, LeftOut):
            left_out.append(document)
            continue
        if configuration_of(document):
            continue
        resource = resources.get(document.kind)
        if resource is None and (mistake := _mistake_of(*document.kind)):
            left_out.append(LeftOut(document.place, mistake))
            continue
        if resource is None:
            ignored[_name_of(*document.kind)] += 1
            continue
        try:
            found[resource.kind].append(_object_of(document, resource, seen, left_out))
        except Refused as problem:
            reason = str(problem).removeprefix(f"{document.place}: ")
            left_out.append(LeftOut(document.place, reason))
    nodes = tuple(found["Node"])
    written = [each.object for each in found["Service"]]
    submissions = submit(written, families_of_cluster(nodes, service_cidrs))
    services = tuple(each.service for each in submissions if each.service is not None)
    slices = list(found["EndpointSlice"])
    awaited = awaiting(services, slices)
    for document in found["Endpoints"]:
        if is_mirrored(document.object, awaited):
            slices += mirrors(document.object)
        elif document.object["metadata"].get("uid"):
            ignored["Endpoints"] += 1
        else:
            left_out.append(LeftOut(document.place, NOT_MIRRORED, is_error=False))
    return Manifests(
        services=services,
        endpoint_slices=tuple(slices),
        nodes=nodes,
        namespaces=tuple(found["Namespace"]),
        address_pools=tuple(found["AddressPool"]),
        address_grants=tuple(found["AddressGrant"]),
        submissions={each.key: each for each in submissions},
        left_out=tuple(left_out),
        ignored=dict(ignored),
    )


def configuration_of(document: Document) -> str:
    """Return the configuration file in a ConfigMap of the chart; empty if it is another object. The
    namespace is that of the release."""
    if document.kind != (CONFIG_MAPS.group_version, CONFIG_MAPS.kind):
        return ""
    metadata, data = document.object.get("metadata"), document.object.get("data")
    if not isinstance(metadata, dict) or metadata.get("name") != CONFIGURATION.name:
        return ""
    text = data.get(CONFIGURATION_FILE) if isinstance(data, dict) else None
    return text if isinstance(text, str) else ""


def _object_of(
    document: Document,
    resource: Resource[Any],
    seen: dict[tuple[str, str, str], str],
    left_out: list[LeftOut],
) -> Any:
    """Return the object of a document, decoded as its type, but Services and Endpoints as they were
    written. `seen` are the places of the objects so far, by kind, namespace and name; fields
    without effect are added to `left_out`. Raise Refused."""
    read = identified(document, resource)
    metadata = read.object["metadata"]
    identity = (resource.kind, metadata["namespace"], metadata["name"])
    name = " ".join((resource.kind, "/".join(filter(None, identity[1:]))))
    if identity in seen:
        raise Refused(
            f"{read.place}: {name} is in {seen[identity]} already", fix="remove one of the two"
        )
    seen[identity] = read.place
    if resource is SERVICES:
        return read
    if why := refusal(resource.kind, read.object):
        raise Refused(f"{read.place}: the API server would refuse {name}: {why}")
    left_out += [
        LeftOut(read.place, f"{name}: {remark}", is_error=False)
        for remark in remarks(resource.kind, read.object)
    ]
    return read if resource is ENDPOINTS else typed(read, resource)


def _mistake_of(group_version: str, kind: str) -> str:
    """Return why no API server has this kind; empty if one may have it."""
    if "/" not in group_version and group_version != "v1":
        return f"there is no apiVersion {group_version}; write v1, or GROUP/VERSION"
    for each in KINDS:
        if each.group_version == group_version and each.kind.lower() == kind.lower():
            return f"there is no kind {kind} in {group_version}; write {each.kind}"
        same_group = each.group_version.partition("/")[0] == group_version.partition("/")[0]
        if each.kind == kind and same_group and each.group_version != group_version:
            return f"there is no {kind} of version {group_version}; write {each.group_version}"
    return ""


def _name_of(group_version: str, kind: str) -> str:
    """Return the name of an ignored kind, with its version if only the version differs."""
    other = any(each.kind == kind for each in KINDS)
    return f"{kind} ({group_version})" if other else kind


def read_documents(paths: Iterable[str | Path], stdin: TextIO | None = None) -> Iterator[Document]:
    """Yield all objects in these files, of any kind; a List yields its items. Raise Refused for the
    first document that cannot be read."""
    for each in scan(paths, stdin):
        if isinstance(each, Document):
            yield each
        elif each.is_error:
            raise Refused(str(each))


def scan(paths: Iterable[str | Path], stdin: TextIO | None = None) -> Iterator[Document | LeftOut]:
    """Yield all objects in these files, of any kind, and what could not be read; a List yields its
    items. Raise Refused for a file that cannot be opened."""
    for path in paths:
        if str(path) == "-":
            yield from _scan_text(_standard_input(stdin), "standard input")
            continue
        if path == "":  # Path would make the present folder of it.
            raise Refused("the path after -f is empty", fix="name a file, a folder, or -")
        for file in files(Path(path)):
            try:
                text = file.read_bytes().decode("utf-8", "surrogateescape")
            except OSError as problem:
                raise Refused(
                    f"{file} cannot be read: {problem.strerror}", fix="check the path after -f"
                ) from None
            yield from _scan_text(text, str(file))


def _standard_input(stdin: TextIO | None) -> str:
    if stdin is not None:
        return stdin.read()
    return sys.stdin.buffer.read().decode("utf-8", "surrogateescape")


def _scan_text(text: str, source: str) -> Iterator[Document | LeftOut]:
    for content in read_contents(text):
        place = f"{source}, document {content.number}, line {content.line}"
        if content.problem:
            yield LeftOut(place, content.problem)
            continue
        yield from (LeftOut(place, remark, is_error=False) for remark in content.remarks)
        if content.value is not None:
            yield from flatten(content.value, place)


def files(path: Path) -> Sequence[Path]:
    """Return the manifest files at a path. Raise Refused for a folder without manifests."""
    if not path.is_dir():
        return [path]
    inside = sorted(
        file
        for folder, _, names in os.walk(path, onerror=_refuse_unreadable)
        for file in (Path(folder, name) for name in names)
        if file.suffix in SUFFIXES and file.is_file()
    )
    if not inside:
        raise Refused(
            f"{path} has no manifests",
            fix="name a folder that contains *.yaml, *.yml or *.json files",
        )
    return inside


def _refuse_unreadable(problem: OSError) -> None:
    """Ignore a folder that vanished meanwhile; refuse one that cannot be read."""
    if not isinstance(problem, FileNotFoundError | ProcessLookupError):
        raise Refused(
            f"{problem.filename} cannot be read: {plain(problem)}", fix="check the path after -f"
        )


def flatten(content: object, place: str) -> Iterator[Document | LeftOut]:
    """Yield an object, or the items of a List.

    The items of a typed list (`ServiceList`) may omit apiVersion and kind."""
    if not isinstance(content, dict):
        what = f"the text {content[:40]!r}" if isinstance(content, str) else "a number or boolean"
        if content is None or isinstance(content, list):
            what = "null" if content is None else "a list"
        yield LeftOut(place, f"this is not an object but {what}")
        return
    for field in ("apiVersion", "kind"):
        if not (isinstance(content.get(field), str) and content[field]):
            yield LeftOut(
                place, f"{field} is missing or no text; every object needs apiVersion and kind"
            )
            return
    kind, items = content["kind"], content.get("items")
    if not (kind.endswith("List") and ("items" in content or kind == "List")):
        yield Document(place, content)
        return
    if not isinstance(items, list | None):
        yield LeftOut(place, "items must be a list")
        return
    for index, item in enumerate(items or ()):
        if isinstance(item, dict) and kind != "List":
            item = {"apiVersion": content["apiVersion"], "kind": kind.removesuffix("List"), **item}
        yield from flatten(item, f"{place}, items[{index}]")


def identified(document: Document, resource: Resource[Any]) -> Document:
    """Return the document without null fields, and with a namespace if its kind has one. Raise
    Refused if its metadata cannot be read."""
    object_ = without_nulls(document.object)
    metadata = object_.get("metadata")
    where = f"{document.place}: {resource.kind}"
    if not isinstance(metadata, dict):
        raise Refused(f"{where}: metadata must be a mapping with a name")
    for field in ("name", "namespace"):
        if not isinstance(metadata.get(field, ""), str):
            raise Refused(f"{where}: metadata.{field} must be a string: put it in quotes")
    if not metadata.get("name"):
        if metadata.get("generateName"):
            raise Refused(
                f"{where}: it has metadata.generateName and no name, which `kubectl apply` refuses",
                fix="write a name; `kubectl create` would generate one",
            )
        raise Refused(f"{where}: metadata.name is missing", fix="write a name")
    namespace = (metadata.get("namespace") or "default") if resource.namespaced else ""
    return Document(document.place, object_ | {"metadata": metadata | {"namespace": namespace}})


def typed(document: Document, resource: Resource[Any]) -> Any:
    """Return the object of a document, decoded as its type. Raise Refused."""
    document = identified(document, resource)
    try:
        return msgspec.convert(document.object, resource.type)
    except msgspec.ValidationError as problem:
        why = complaint(problem, document.object, resource.type)
        raise Refused(f"{document.place}: {resource.kind}: {why}") from None
