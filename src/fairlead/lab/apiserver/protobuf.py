"""Bodies in protobuf, which clients in Go (kubectl's `create namespace`, `drain`) send for built-in
kinds.

In: the bytes of a body in `application/vnd.kubernetes.protobuf`. Out: the object that the same body
in JSON would decode to. Responses are never in protobuf: these clients accept JSON, too. Only the
kinds that such clients write are supported. Follows the protobuf encoding of Kubernetes (the
`k8s\\0` envelope, runtime.Unknown) and the field numbers of the generated.proto files of k8s.io/api
and k8s.io/apimachinery.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, NamedTuple

from fairlead.errors import plain
from fairlead.kube.rules.causes import Object
from fairlead.lab.apiserver.failure import bad_request

MEDIA_TYPE: Final = "application/vnd.kubernetes.protobuf"
_MAGIC: Final = b"k8s\x00"

Sort = Literal["text", "number", "flag", "time", "microtime", "number or text", "map"]


class Field(NamedTuple):
    """A field of a message. `given`: it is a pointer in Go, so zero is a value; in other fields
    zero means absent."""

    name: str
    sort: "Sort | Mapping[int, Field]" = "text"
    many: bool = False
    given: bool = False


Message = Mapping[int, Field]

_OWNER: Final[Message] = {
    1: Field("kind"),
    3: Field("name"),
    4: Field("uid"),
    5: Field("apiVersion"),
    6: Field("controller", "flag", given=True),
    7: Field("blockOwnerDeletion", "flag", given=True),
}
_METADATA: Final[Message] = {
    1: Field("name"),
    2: Field("generateName"),
    3: Field("namespace"),
    5: Field("uid"),
    6: Field("resourceVersion"),
    7: Field("generation", "number"),
    8: Field("creationTimestamp", "time"),
    9: Field("deletionTimestamp", "time"),
    10: Field("deletionGracePeriodSeconds", "number", given=True),
    11: Field("labels", "map"),
    12: Field("annotations", "map"),
    13: Field("ownerReferences", _OWNER, many=True),
    14: Field("finalizers", many=True),
}
_SERVICE_PORT: Final[Message] = {
    1: Field("name"),
    2: Field("protocol"),
    3: Field("port", "number"),
    4: Field("targetPort", "number or text"),
    5: Field("nodePort", "number"),
    6: Field("appProtocol", given=True),
}
_SERVICE_SPEC: Final[Message] = {
    1: Field("ports", _SERVICE_PORT, many=True),
    2: Field("selector", "map"),
    3: Field("clusterIP"),
    4: Field("type"),
    5: Field("externalIPs", many=True),
    7: Field("sessionAffinity"),
    8: Field("loadBalancerIP"),
    9: Field("loadBalancerSourceRanges", many=True),
    10: Field("externalName"),
    11: Field("externalTrafficPolicy"),
    12: Field("healthCheckNodePort", "number"),
    13: Field("publishNotReadyAddresses", "flag"),
    14: Field(
        "sessionAffinityConfig",
        {1: Field("clientIP", {1: Field("timeoutSeconds", "number", given=True)})},
    ),
    17: Field("ipFamilyPolicy", given=True),
    18: Field("clusterIPs", many=True),
    19: Field("ipFamilies", many=True),
    20: Field("allocateLoadBalancerNodePorts", "flag", given=True),
    21: Field("loadBalancerClass", given=True),
    22: Field("internalTrafficPolicy", given=True),
    23: Field("trafficDistribution", given=True),
}
_REFERENCE: Final[Message] = {
    number: Field(name)
    for number, name in enumerate(
        ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath"), 1
    )
}
_EVENT: Final[Message] = {
    1: Field("metadata", _METADATA),
    2: Field("involvedObject", _REFERENCE),
    3: Field("reason"),
    4: Field("message"),
    5: Field("source", {1: Field("component"), 2: Field("host")}),
    6: Field("firstTimestamp", "time"),
    7: Field("lastTimestamp", "time"),
    8: Field("count", "number"),
    9: Field("type"),
    10: Field("eventTime", "microtime"),
    11: Field("series", {1: Field("count", "number"), 2: Field("lastObservedTime", "microtime")}),
    12: Field("action"),
    13: Field("related", _REFERENCE),
    14: Field("reportingComponent"),
    15: Field("reportingInstance"),
}
_LEASE_SPEC: Final[Message] = {
    1: Field("holderIdentity", given=True),
    2: Field("leaseDurationSeconds", "number", given=True),
    3: Field("acquireTime", "microtime"),
    4: Field("renewTime", "microtime"),
    5: Field("leaseTransitions", "number", given=True),
}
_DELETE_OPTIONS: Final[Message] = {
    1: Field("gracePeriodSeconds", "number", given=True),
    2: Field(
        "preconditions", {1: Field("uid", given=True), 2: Field("resourceVersion", given=True)}
    ),
    4: Field("propagationPolicy", given=True),
    5: Field("dryRun", many=True),
}
_MESSAGES: Final[Mapping[str, Message]] = {
    "Namespace": {1: Field("metadata", _METADATA)},
    "Service": {1: Field("metadata", _METADATA), 2: Field("spec", _SERVICE_SPEC)},
    "Event": _EVENT,
    "Lease": {1: Field("metadata", _METADATA), 2: Field("spec", _LEASE_SPEC)},
    "DeleteOptions": _DELETE_OPTIONS,
}
_UNKNOWN: Final[Message] = {1: Field("type", {1: Field("apiVersion"), 2: Field("kind")})}
_TIME: Final[Message] = {1: Field("seconds", "number"), 2: Field("nanos", "number")}


def decode(data: bytes) -> Object:
    """Return the object in a body. Raise ApiFailure 400 for a malformed body or an unsupported
    kind."""
    if not data.startswith(_MAGIC):
        raise bad_request(
            "provided data does not appear to be a protobuf message, expected prefix [107 56 115 0]"
        )
    try:
        envelope = data[len(_MAGIC) :]
        head = _message(envelope, _UNKNOWN).get("type", {})
        raw = next(
            (
                value
                for number, value in _fields(envelope)
                if number == 2 and isinstance(value, bytes)
            ),
            b"",
        )
        kind = head.get("kind", "")
        if kind not in _MESSAGES:
            raise bad_request(
                f"protobuf is not supported for {kind or 'an object without kind'}: send JSON"
            )
        return dict(head) | _message(raw, _MESSAGES[kind])
    except (IndexError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise bad_request(f"error decoding protobuf: {plain(error)}") from error


def _message(data: bytes, fields: Message) -> Object:
    found: Object = {}
    for number, raw in _fields(data):
        field = fields.get(number)
        if field is None:
            continue
        value = _value(raw, field)
        if field.sort == "map":
            found.setdefault(field.name, {}).update(value)
        elif field.many:
            found.setdefault(field.name, []).append(value)
        elif field.given or value not in ("", 0, False, None):
            found[field.name] = value
    return found


def _value(raw: int | bytes, field: Field) -> Any:
    if isinstance(raw, int):
        # Negative numbers are encoded as 64-bit two's complement.
        return bool(raw) if field.sort == "flag" else raw - (1 << 64) if raw >> 63 else raw
    match field.sort:
        case "text":
            return raw.decode()
        case "map":
            pair = _message(raw, {1: Field("key"), 2: Field("value")})
            return {pair.get("key", ""): pair.get("value", "")}
        case "number or text":
            parts = _message(
                raw, {1: Field("type", "number"), 2: Field("number", "number"), 3: Field("text")}
            )
            return parts.get("text", "") if parts.get("type") else parts.get("number", 0)
        case "time" | "microtime":
            return _time(raw, micro=field.sort == "microtime")
        case "number" | "flag":
            raise ValueError(f"{field.name} is not a number")
        case message:
            return _message(raw, message)


def _time(raw: bytes, *, micro: bool) -> str | None:
    parts = _message(raw, _TIME)
    if not parts:
        return None
    moment = datetime.fromtimestamp(parts.get("seconds", 0), UTC)
    text = moment.strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{parts.get('nanos', 0) // 1000:06d}Z" if micro else f"{text}Z"


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value, an integer or bytes, of each field on the wire."""
    offset = 0
    while offset < len(data):
        tag, offset = _varint(data, offset)
        match tag & 7:
            case 0:
                value, offset = _varint(data, offset)
                yield tag >> 3, value
            case 2:
                length, offset = _varint(data, offset)
                if offset + length > len(data):
                    raise ValueError("a field is truncated")
                yield tag >> 3, data[offset : offset + length]
                offset += length
            case 1:
                offset += 8
            case 5:
                offset += 4
            case other:
                raise ValueError(f"wire type {other}")


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[offset]
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80:
            return value, offset
        if shift > 63:
            raise ValueError("a number is too long")
