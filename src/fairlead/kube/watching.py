"""Read what a list or a watch brings: one item or line at a time into a key and an object. Pure.

In: bytes from the API server. Out: tagged values. The envelope is read apart from the object, for
the objects of BOOKMARK and ERROR lack the fields that the type demands, and one object that cannot
be read must not cost the others. Follows the API concepts, sections "Efficient detection of
changes", "Watch bookmarks" and "Streaming lists" (KEP-3157)."""

from typing import Any, Generic, Literal

import msgspec

from fairlead.errors import FairleadError
from fairlead.kube.answers import ServerUnavailable, failure
from fairlead.kube.objects import ObjectKey, ObjectMeta, ObjectT, version_number

INITIAL_EVENTS_END = "k8s.io/initial-events-end"


class Item(msgspec.Struct, Generic[ObjectT], frozen=True):
    """An object as the server has it, or (`gone`) as it last was. `object` is None if it cannot be
    read: `problem` says why."""

    key: ObjectKey
    version: str
    object: ObjectT | None
    gone: bool = False
    problem: str = ""


class Bookmark(msgspec.Struct, frozen=True):
    """Everything up to `version` has been told; `complete`: this ends the initial state of a
    streamed list."""

    version: str
    complete: bool


class Unreadable(msgspec.Struct, frozen=True):
    """Something without even a name."""

    problem: str


class Envelope(msgspec.Struct, frozen=True, gc=False):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class Bare(msgspec.Struct, frozen=True, gc=False):
    """What any object has."""

    metadata: ObjectMeta


class BareStatus(msgspec.Struct, frozen=True, gc=False):
    code: int = 500


ENVELOPE = msgspec.json.Decoder(Envelope)
BARE = msgspec.json.Decoder(Bare)
BARE_STATUS = msgspec.json.Decoder(BareStatus)


def read_item(
    decoder: msgspec.json.Decoder[ObjectT], data: msgspec.Raw, *, gone: bool = False
) -> Item[ObjectT] | Unreadable:
    """One object of a list or of an event."""
    try:
        object_ = decoder.decode(data)
    except msgspec.DecodeError as problem:
        try:
            metadata = BARE.decode(data).metadata
        except msgspec.DecodeError:
            return Unreadable(str(problem))
        return Item(key_of(metadata), metadata.resource_version, None, gone, str(problem))
    return Item(key_of(object_.metadata), object_.metadata.resource_version, object_, gone)


def read_line(
    decoder: msgspec.json.Decoder[ObjectT], line: bytes
) -> Item[ObjectT] | Bookmark | Unreadable:
    """One line of a watch. Raises what an ERROR event means (`Expired` for 410), and Unavailable
    for what is no event."""
    try:
        event = ENVELOPE.decode(line)
    except msgspec.DecodeError as problem:
        raise ServerUnavailable(f"the watch brought a line that is no event: {problem}") from None
    match event.type:
        case "ERROR":
            raise error_of(event.object)
        case "BOOKMARK":
            return read_bookmark(event.object)
        case kind:
            return read_item(decoder, event.object, gone=kind == "DELETED")


def read_bookmark(data: msgspec.Raw) -> Bookmark | Unreadable:
    try:
        metadata = BARE.decode(data).metadata
    except msgspec.DecodeError as problem:
        return Unreadable(str(problem))
    return Bookmark(
        metadata.resource_version, metadata.annotations.get(INITIAL_EVENTS_END) == "true"
    )


def error_of(status: msgspec.Raw) -> FairleadError:
    """What the object of an ERROR event means: the same as an answer with its code."""
    try:
        code = BARE_STATUS.decode(status).code
    except msgspec.DecodeError:
        code = 500
    return failure("the watch", code, bytes(status))


def key_of(metadata: ObjectMeta) -> ObjectKey:
    return ObjectKey(metadata.namespace, metadata.name)


def is_older(version: str, other: str) -> bool:
    """Whether a version is from before another one of the same kind. One that is no number is
    neither before nor after."""
    return 0 < version_number(version) < version_number(other)


def same_but_version(old: Any, new: Any) -> bool:
    """Whether nothing that is read differs but the resourceVersion, as after a node's heartbeat."""
    if old.metadata.resource_version == new.metadata.resource_version:
        return bool(old == new)
    metadata = msgspec.structs.replace(new.metadata, resource_version=old.metadata.resource_version)
    return bool(old == msgspec.structs.replace(new, metadata=metadata))
