"""Decode the items of a list and the events of a watch, one by one, into a key and an object. Pure.

In: bytes from the API server. Out: tagged values. The envelope is decoded separately from the
object: the objects of BOOKMARK and ERROR events lack required fields of the type, and one object
that cannot be decoded must not affect the others. Follows the API concepts, sections "Efficient
detection of changes", "Watch bookmarks" and "Streaming lists" (KEP-3157)."""

from typing import Any, Generic, Literal

import msgspec

from fairlead.errors import FairleadError
from fairlead.kube.answers import ServerUnavailable, failure
from fairlead.kube.objects import ObjectKey, ObjectMeta, ObjectT, version_number
from fairlead.mistakes import explain

INITIAL_EVENTS_END = "k8s.io/initial-events-end"


class Item(msgspec.Struct, Generic[ObjectT], frozen=True):
    """An object in its present state, or (`gone`) in its last state before it was deleted.

    `object` is None if it cannot be decoded; `problem` then states why."""

    key: ObjectKey
    version: str
    object: ObjectT | None
    gone: bool = False
    problem: str = ""


class Bookmark(msgspec.Struct, frozen=True):
    """The watch is current up to `version`. `complete`: the initial state of a streamed list ends
    here."""

    version: str
    complete: bool


class Unreadable(msgspec.Struct, frozen=True):
    """An item whose name cannot be decoded either."""

    problem: str


class Envelope(msgspec.Struct, frozen=True, gc=False):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class MetadataOnly(msgspec.Struct, frozen=True, gc=False):
    """The fields that every object has."""

    metadata: ObjectMeta


class StatusCode(msgspec.Struct, frozen=True, gc=False):
    code: int = 500


ENVELOPE = msgspec.json.Decoder(Envelope)
METADATA_ONLY = msgspec.json.Decoder(MetadataOnly)
STATUS_CODE = msgspec.json.Decoder(StatusCode)


def read_item(
    decoder: msgspec.json.Decoder[ObjectT], data: msgspec.Raw, *, gone: bool = False
) -> Item[ObjectT] | Unreadable:
    """Decode one object of a list or of an event."""
    try:
        object_ = decoder.decode(data)
    except msgspec.DecodeError as problem:
        try:
            metadata = METADATA_ONLY.decode(data).metadata
        except msgspec.DecodeError:
            return Unreadable(explain(problem, decoder.type))
        said = explain(problem, decoder.type)
        return Item(key_of(metadata), metadata.resource_version, None, gone, said)
    return Item(key_of(object_.metadata), object_.metadata.resource_version, object_, gone)


def read_line(
    decoder: msgspec.json.Decoder[ObjectT], line: bytes
) -> Item[ObjectT] | Bookmark | Unreadable:
    """Decode one line of a watch.

    Raise the error that an ERROR event stands for (`Expired` for 410), and Unavailable for a line
    that is not an event."""
    try:
        event = ENVELOPE.decode(line)
    except msgspec.DecodeError as problem:
        said = explain(problem, Envelope)
        raise ServerUnavailable(f"the watch sent a line that is not an event: {said}") from None
    match event.type:
        case "ERROR":
            raise error_of(event.object)
        case "BOOKMARK":
            return read_bookmark(event.object)
        case kind:
            return read_item(decoder, event.object, gone=kind == "DELETED")


def read_bookmark(data: msgspec.Raw) -> Bookmark | Unreadable:
    try:
        metadata = METADATA_ONLY.decode(data).metadata
    except msgspec.DecodeError as problem:
        return Unreadable(explain(problem, MetadataOnly))
    return Bookmark(
        metadata.resource_version, metadata.annotations.get(INITIAL_EVENTS_END) == "true"
    )


def error_of(status: msgspec.Raw) -> FairleadError:
    """Return the error that an ERROR event stands for: the same as for a response with its code."""
    try:
        code = STATUS_CODE.decode(status).code
    except msgspec.DecodeError:
        code = 500
    return failure("the watch", code, bytes(status))


def key_of(metadata: ObjectMeta) -> ObjectKey:
    return ObjectKey(metadata.namespace, metadata.name)


def is_older(version: str, other: str) -> bool:
    """Return whether a version is older than another one of the same kind; False if either is not a
    number."""
    return 0 < version_number(version) < version_number(other)


def same_but_version(old: Any, new: Any) -> bool:
    """Return whether the decoded fields are equal except for resourceVersion, as after a node's
    heartbeat."""
    if old.metadata.resource_version == new.metadata.resource_version:
        return bool(old == new)
    metadata = msgspec.structs.replace(new.metadata, resource_version=old.metadata.resource_version)
    return bool(old == msgspec.structs.replace(new, metadata=metadata))
