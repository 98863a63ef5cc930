"""Read Kubernetes objects from manifests instead of an API server.

In: files, folders (all *.yaml, *.yml and *.json below them, sorted by name) or `-` for standard
input; YAML or JSON, several documents per file, Lists. Out: typed objects of the kinds that the
plan uses, or the untyped documents. Invariants: an error message names file, document and field;
objects of other kinds are counted and not parsed; a namespaced object without a namespace is in
`default`, as with kubectl."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

import msgspec
import yaml

from fairlead.errors import Refused, plain
from fairlead.kube.crds import ADDRESS_GRANTS, ADDRESS_POOLS, AddressGrant, AddressPool
from fairlead.kube.objects import (
    ENDPOINT_SLICES,
    NAMESPACES,
    NODES,
    SERVICES,
    EndpointSlice,
    Namespace,
    Node,
    Resource,
    Service,
)
from fairlead.mistakes import explain

SUFFIXES = frozenset((".yaml", ".yml", ".json"))

TypeT = TypeVar("TypeT")


class Document(msgspec.Struct, frozen=True):
    """One object as it was written. `place` is its file and document, for messages."""

    place: str
    object: Mapping[str, Any]

    @property
    def kind(self) -> tuple[str, str]:
        """The apiVersion and kind of the object."""
        return self.object["apiVersion"], self.object["kind"]


class Manifests(msgspec.Struct, frozen=True):
    """The objects that were read. `ignored` counts the objects of other kinds, by kind."""

    services: tuple[Service, ...] = ()
    endpoint_slices: tuple[EndpointSlice, ...] = ()
    nodes: tuple[Node, ...] = ()
    namespaces: tuple[Namespace, ...] = ()
    address_pools: tuple[AddressPool, ...] = ()
    address_grants: tuple[AddressGrant, ...] = ()
    ignored: Mapping[str, int] = msgspec.field(default_factory=dict)


class TextLoader(yaml.CSafeLoader):
    """Load YAML as Kubernetes does: a date is text.

    PyYAML's loaders would turn `creationTimestamp: 2026-01-31T00:00:00Z` into a datetime."""


TextLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


def read_manifests(paths: Iterable[str | Path], stdin: TextIO | None = None) -> Manifests:
    """Return all objects in these files that the plan uses.

    Raise Refused for the first error; an object that occurs twice is an error."""
    kinds = (SERVICES, ENDPOINT_SLICES, NODES, NAMESPACES, ADDRESS_POOLS, ADDRESS_GRANTS)
    found: dict[str, list[Any]] = {resource.kind: [] for resource in kinds}
    resources = {(r.group_version, r.kind): r for r in kinds}
    ignored: Counter[str] = Counter()
    seen: dict[tuple[str, str, str], str] = {}
    for document in read_documents(paths, stdin):
        resource = resources.get(document.kind)
        if resource is None:
            ignored[document.kind[1]] += 1
            continue
        object_ = typed(document, resource)
        identity = (resource.kind, object_.metadata.namespace, object_.metadata.name)
        if identity in seen:
            name = f"{resource.kind} {object_.metadata.namespace}/{object_.metadata.name}"
            raise Refused(
                f"{document.place}: {name} is in {seen[identity]} already",
                fix="remove one of the two",
            )
        seen[identity] = document.place
        found[resource.kind].append(object_)
    return Manifests(
        services=tuple(found["Service"]),
        endpoint_slices=tuple(found["EndpointSlice"]),
        nodes=tuple(found["Node"]),
        namespaces=tuple(found["Namespace"]),
        address_pools=tuple(found["AddressPool"]),
        address_grants=tuple(found["AddressGrant"]),
        ignored=dict(ignored),
    )


def read_documents(paths: Iterable[str | Path], stdin: TextIO | None = None) -> Iterator[Document]:
    """Yield all objects in these files, of any kind; a List yields its items. Raise Refused."""
    for path in paths:
        if str(path) == "-":
            yield from parse((stdin or sys.stdin).read(), "standard input")
            continue
        for file in files(Path(path)):
            try:
                text = file.read_text()
            except (OSError, UnicodeDecodeError) as problem:
                raise Refused(f"{file} cannot be read: {plain(problem)}") from None
            yield from parse(text, str(file))


def files(path: Path) -> Sequence[Path]:
    """Return the manifest files at a path. Raise Refused for a folder without manifests."""
    if not path.is_dir():
        return [path]
    inside = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not inside:
        raise Refused(
            f"{path} has no manifests",
            fix="name a folder that contains *.yaml, *.yml or *.json files",
        )
    return inside


def parse(text: str, source: str) -> Iterator[Document]:
    """Yield the objects in the text of one file. JSON is parsed as YAML, of which it is a
    subset."""
    number = 0
    try:
        for number, content in enumerate(yaml.load_all(text, TextLoader), start=1):
            if content is not None:
                yield from flatten(content, f"{source}:{number}")
    except yaml.YAMLError as problem:
        raise Refused(f"{source}:{number + 1}: this is not valid YAML: {plain(problem)}") from None


def flatten(content: object, place: str) -> Iterator[Document]:
    """Yield an object, or the items of a List.

    The items of a typed list (`ServiceList`) may omit apiVersion and kind."""
    if not isinstance(content, dict):
        raise Refused(f"{place}: this is not an object but {type(content).__name__}")
    for field in ("apiVersion", "kind"):
        if not isinstance(content.get(field), str):
            raise Refused(
                f"{place}: $.{field} is missing", fix="every object needs apiVersion and kind"
            )
    kind = content["kind"]
    if not (kind.endswith("List") and isinstance(content.get("items"), list)):
        yield Document(place, content)
        return
    for index, item in enumerate(content["items"]):
        if isinstance(item, dict) and kind != "List":
            item = {"apiVersion": content["apiVersion"], "kind": kind.removesuffix("List"), **item}
        yield from flatten(item, f"{place}: $.items[{index}]")


def typed(document: Document, resource: Resource[Any]) -> Any:
    """Return the object of a document, decoded as its type. Raise Refused."""
    try:
        object_ = msgspec.convert(document.object, resource.type)
    except msgspec.ValidationError as problem:
        raise Refused(
            f"{document.place}: {resource.kind}: {explain(problem, resource.type)}"
        ) from None
    metadata = object_.metadata
    if not metadata.name:
        raise Refused(f"{document.place}: {resource.kind}: $.metadata.name is missing")
    namespace = (metadata.namespace or "default") if resource.namespaced else ""
    if namespace == metadata.namespace:
        return object_
    return msgspec.structs.replace(
        object_, metadata=msgspec.structs.replace(metadata, namespace=namespace)
    )
