"""The pure parts of the client of OVSDB: framing, values, schema, operations, updates of rows."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.errors import Conflict, FairleadError, Refused, Unavailable
from fairlead.net.ovsdb import (
    Delete,
    Insert,
    Mutate,
    Operation,
    OutcomeUnknown,
    Result,
    Row,
    Select,
    Table,
    Update,
    Wait,
    by_uuid,
)
from fairlead.net.ovsdb.framing import Framer
from fairlead.net.ovsdb.membership import SCHEMA, Membership
from fairlead.net.ovsdb.operations import encode_operation, is_repeatable, read_results
from fairlead.net.ovsdb.replica import Replica, RowUpdate
from fairlead.net.ovsdb.schema import Schema, read_schema
from fairlead.net.ovsdb.values import ColumnType, apply_difference, decode, encode

ROW, OTHER = "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002"
SET = ColumnType("string", minimum=0, maximum=None)
MAP = ColumnType("string", "string", 0, None)
OPTIONAL = ColumnType("integer", minimum=0)
TABLE = {
    "_uuid": ColumnType("uuid"),
    "name": ColumnType("string"),
    "fields": SET,
    "vips": MAP,
    "tag": OPTIONAL,
    "refs": ColumnType("uuid", minimum=0, maximum=None),
    "share": ColumnType("real"),
}
LAB = Schema("Lab", "1.0.0", {"T": TABLE})

texts = st.text(alphabet='ab"\\{}[]é\U0001f6a2 \n', max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(texts, json_values, max_size=3), max_size=4), st.data())
def test_the_objects_of_a_stream_do_not_depend_on_its_division(
    objects: list[dict[str, Any]], data: st.DataObject
) -> None:
    ascii_only, indent = data.draw(st.booleans()), data.draw(st.sampled_from([None, 1]))
    texts = [json.dumps(each, ensure_ascii=ascii_only, indent=indent) for each in objects]
    stream = data.draw(st.sampled_from(["", "\n", " "])).join(texts).encode()
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    framer = Framer(1 << 20)
    found: list[bytes] = []
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(stream)], strict=True):
        found += framer.feed(stream[start:end])
    assert [json.loads(each) for each in found] == objects
    assert framer.pending_bytes == 0


@given(st.lists(st.binary(max_size=20) | st.sampled_from([b"{", b"}", b'"', b"\\"]), max_size=20))
def test_any_bytes_are_objects_or_an_error(chunks: list[bytes]) -> None:
    """Whatever arrives, at most the limit is kept, and bytes are neither lost nor invented."""
    framer = Framer(64)
    found: list[bytes] = []
    try:
        for chunk in chunks:
            found += framer.feed(chunk)
            assert framer.pending_bytes <= 64
    except (Unavailable, Refused):
        return
    stream = b"".join(chunks)
    assert all(each in stream and each[:1] == b"{" and each[-1:] == b"}" for each in found)


@pytest.mark.parametrize("stream", [b"}", b"[1]", b'"a"{}', b"{} x {}", b"null"])
def test_bytes_between_objects_are_an_error(stream: bytes) -> None:
    with pytest.raises(Unavailable, match="a JSON object was expected"):
        Framer(100).feed(stream)


def test_an_object_above_the_limit_is_refused_before_its_end() -> None:
    framer = Framer(1000)
    framer.feed(b'{"a": "' + 900 * b"x")
    with pytest.raises(Refused, match="larger than the limit of 1000 bytes"):
        framer.feed(100 * b"x")


def test_a_string_is_scanned_once_however_many_chunks_it_has() -> None:
    """A scan from the start of the string for each chunk would take minutes."""
    framer = Framer(1 << 26)
    framer.feed(b'{"a": "')
    for _ in range(20_000):
        assert framer.feed(1000 * b"x") == []
    (found,) = framer.feed(b'"}')
    assert len(found) == 20_000_000 + 9


atoms = {
    "string": texts,
    "integer": st.integers(-(1 << 63), (1 << 63) - 1),
    "real": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "uuid": st.uuids().map(str),
}


@st.composite
def typed_values(draw: st.DrawFn) -> tuple[ColumnType, Any]:
    """Draw a type of a column and two of its values."""
    key, value = draw(st.sampled_from(sorted(atoms))), draw(st.sampled_from(sorted(atoms)))
    form = draw(st.sampled_from(["scalar", "optional", "set", "map"]))
    kind, values = {
        "scalar": (ColumnType(key), atoms[key]),
        "optional": (ColumnType(key, minimum=0), st.none() | atoms[key]),
        "set": (ColumnType(key, minimum=0, maximum=None), st.frozensets(atoms[key], max_size=4)),
        "map": (
            ColumnType(key, value, 0, None),
            st.dictionaries(atoms[key], atoms[value], max_size=4),
        ),
    }[form]
    return kind, (draw(values), draw(values))


@given(typed_values())
def test_a_value_survives_the_way_to_the_server_and_back(typed: tuple[ColumnType, Any]) -> None:
    kind, (value, _) = typed
    wire = msgspec.json.decode(msgspec.json.encode(encode(kind, value)))
    assert decode(kind, wire) == value


@given(typed_values())
def test_a_difference_leads_from_one_value_to_the_other(typed: tuple[ColumnType, Any]) -> None:
    kind, (old, new) = typed
    if isinstance(old, dict):
        changed = {key: old.get(key, new.get(key)) for key in old.keys() ^ new.keys()}
        difference: Any = {
            **changed,
            **{key: new[key] for key in old.keys() & new.keys() if old[key] != new[key]},
        }
    else:
        difference = old ^ new if isinstance(old, frozenset) else new
    wire = msgspec.json.decode(msgspec.json.encode(encode(kind, difference)))
    assert apply_difference(kind, old, wire) == new


@given(st.sampled_from([SET, MAP, OPTIONAL, *TABLE.values()]), json_values)
def test_any_json_is_a_value_of_the_column_or_an_error(kind: ColumnType, data: Any) -> None:
    try:
        value = decode(kind, data)
    except Unavailable:
        return
    assert decode(kind, msgspec.to_builtins(encode(kind, value))) == value


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (ColumnType("integer"), True),
        (ColumnType("integer"), 1.5),
        (ColumnType("boolean"), 1),
        (ColumnType("string"), None),
        (ColumnType("uuid"), ROW),
        (ColumnType("uuid"), ["uuid", "x"]),
        (ColumnType("uuid"), ["named-uuid", ROW]),
        (OPTIONAL, ["set", [1, 2]]),
        (SET, ["set", [1]]),
        (SET, ["map", []]),
        (MAP, ["map", [["a", 1]]]),
        (MAP, ["map", [["a"]]]),
        (MAP, ["set", []]),
        (MAP, {}),
    ],
)
def test_a_value_of_another_type_is_an_error(kind: ColumnType, data: Any) -> None:
    with pytest.raises(Unavailable, match=f"expected a {kind}"):
        decode(kind, data)


def test_a_schema_has_the_types_of_its_columns() -> None:
    answer = {
        "name": "Lab",
        "version": "1.2.3",
        "tables": {
            "T": {
                "columns": {
                    "name": {"type": "string"},
                    "fields": {"type": {"key": {"type": "string"}, "min": 0, "max": "unlimited"}},
                    "two": {"type": {"key": "integer", "min": 0, "max": 2}},
                    "vips": {"type": {"key": "string", "value": "string", "min": 0, "max": 9}},
                }
            }
        },
    }
    schema = read_schema(json.dumps(answer).encode())
    assert schema.version == "1.2.3"
    assert {
        str(schema.column("T", each)) for each in ("name", "fields", "two", "vips", "_uuid")
    } == {*("string", "set of string", "set of integer", "map from string to string", "uuid")}
    with pytest.raises(Refused, match="does not have the columns a, b of table T"):
        schema.require("T", ("name", "a", "b"))


@pytest.mark.parametrize(
    "answer", [b"null", b"{}", b"[]", b'{"name":"x","tables":{"T":{"columns":{"c":{"type":"x"}}}}}']
)
def test_a_malformed_schema_is_an_error(answer: bytes) -> None:
    with pytest.raises(Unavailable, match="the answer to get_schema is malformed"):
        read_schema(answer)


def test_operations_have_the_form_of_rfc_7047() -> None:
    assert encode_operation(LAB, Insert("T", {"name": "a", "tag": None}, ROW)) == {
        "op": "insert",
        "table": "T",
        "row": {"name": "a", "tag": ["set", []]},
        "uuid": ROW,
    }
    assert encode_operation(LAB, Wait("T", by_uuid(ROW), ({"vips": {"a": "b"}},))) == {
        "op": "wait",
        "table": "T",
        "where": [["_uuid", "==", ["uuid", ROW]]],
        "columns": ["vips"],
        "rows": [{"vips": ["map", [["a", "b"]]]}],
        "until": "==",
        "timeout": 0,
    }
    removed = (("vips", "delete", frozenset({"k"})), ("refs", "insert", frozenset({OTHER})))
    assert encode_operation(LAB, Mutate("T", (), removed)) == {
        "op": "mutate",
        "table": "T",
        "where": [],
        "mutations": [
            ["vips", "delete", ["set", ["k"]]],
            ["refs", "insert", ["set", [["uuid", OTHER]]]],
        ],
    }


@pytest.mark.parametrize(
    ("operations", "expected"),
    [
        ([Update("T", (), {"name": "a"}), Delete("T", ())], True),
        ([Mutate("T", (), (("fields", "insert", frozenset("a")),))], True),
        ([Mutate("T", (), (("tag", "+=", 1),))], False),
        ([Insert("T", {}, ROW), Mutate("T", (), (("tag", "+=", 1),))], True),
        ([Wait("T", (), ({"tag": 1},)), Mutate("T", (), (("tag", "+=", 1),))], True),
        ([Wait("T", (), ({"name": "a"},)), Mutate("T", (), (("tag", "+=", 1),))], False),
        ([Wait("T", (), ()), Mutate("T", (), (("tag", "+=", 1),))], False),
    ],
)
def test_arithmetic_is_repeated_only_if_a_second_execution_is_refused(
    operations: list[Operation], expected: bool
) -> None:
    assert is_repeatable(operations) == expected


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        ([{}, {"error": "timed out"}], Conflict, "delete of T: the server answered 'timed out'"),
        (
            [{}, {"count": 0}, {"error": "referential integrity violation", "details": "no row"}],
            Conflict,
            "the commit: the server answered 'referential integrity violation': no row",
        ),
        ([{"error": "constraint violation"}], Refused, "wait of T where name == a"),
        ([{"error": "not leader"}], Unavailable, "not leader"),
        ([{}], OutcomeUnknown, "2 operations has only 1 results"),
        ([{}, {"count": "x"}], OutcomeUnknown, "delete of T: malformed result"),
        ({}, OutcomeUnknown, "is no list"),
        ([None, None], OutcomeUnknown, "malformed result 'None'"),
    ],
)
def test_an_answer_without_results_is_an_error(
    answer: Any, error: type[FairleadError], text: str
) -> None:
    operations: list[Operation] = [Wait("T", (("name", "==", "a"),), ()), Delete("T", ())]
    with pytest.raises(error) as raised:
        read_results(LAB, operations, answer)
    assert text in str(raised.value)


@given(json_values)
def test_any_answer_is_results_or_an_error(answer: Any) -> None:
    operations: list[Operation] = [
        Insert("T", {}, ROW),
        Update("T", (), {}),
        Select("T", (), ("name",)),
    ]
    for each in (answer, [answer], [answer, answer, answer], [{"rows": [answer]}] * 3):
        try:
            results = read_results(LAB, operations, each)
        except FairleadError:
            continue
        assert all(isinstance(result, Result) for result in results)


TABLES = {"T": Table(("name", "vips"))}


def test_a_malformed_notification_changes_nothing() -> None:
    replica = Replica(LAB, TABLES)
    replica.update({"T": {ROW: RowUpdate(insert={"name": "a"})}})
    for updates in (
        {"T": {ROW: RowUpdate(modify={"name": "b"}), OTHER: RowUpdate(modify={"name": "c"})}},
        {"T": {ROW: RowUpdate(modify={"name": "b"}), OTHER: RowUpdate(insert={"name": 1})}},
        {"T": {ROW: RowUpdate()}},
        {"T": {"no uuid": RowUpdate(insert={})}},
        {"T": {ROW: RowUpdate(modify={"name": "b"})}, "U": {}},
    ):
        with pytest.raises(Unavailable):
            replica.update(updates)
        with pytest.raises(Unavailable):
            replica.replace(updates)
        assert replica.tables == {"T": {ROW: Row(ROW, {"name": "a", "vips": {}})}}


def test_the_deletion_of_an_unknown_row_is_a_deletion() -> None:
    assert Replica(LAB, TABLES).update({"T": {ROW: RowUpdate(delete=None)}}) == {"T": {ROW: None}}


def member(**columns: Any) -> Row:
    replica = Replica(SCHEMA, {"Database": Table(tuple(SCHEMA.columns("Database")))})
    data = {
        "model": "clustered",
        "connected": True,
        "leader": False,
        "cid": ["uuid", ROW],
        **columns,
    }
    data = {key: value for key, value in data.items() if key in SCHEMA.columns("Database")}
    replica.update({"Database": {OTHER: RowUpdate(insert=data)}})
    return replica.tables["Database"][OTHER]


def test_a_member_without_its_cluster_or_with_older_data_is_not_used() -> None:
    cluster = Membership(leader_only=False, patience=2)
    cluster.check("Lab", member(index=10))
    with pytest.raises(Unavailable, match="has lost the cluster"):
        cluster.check("Lab", member(index=11, connected=False))
    with pytest.raises(Unavailable, match="log index 9 instead of 10"):
        cluster.check("Lab", member(index=9))
    cluster.check("Lab", member(index=10))
    with pytest.raises(Unavailable, match="does not have the database Lab"):
        cluster.check("Lab", None)
    cluster.check("Lab", member(index=1, cid=["uuid", OTHER]))


def test_a_cluster_that_was_restored_from_a_backup_is_used_after_some_attempts() -> None:
    cluster = Membership(leader_only=False, patience=2)
    cluster.check("Lab", member(index=10))
    for _ in range(2):
        with pytest.raises(Unavailable, match="older data"):
            cluster.check("Lab", member(index=3))
    cluster.check("Lab", member(index=3))
    cluster.check("Lab", member(index=4))


def test_a_server_alone_is_used_also_if_only_leaders_are() -> None:
    Membership(leader_only=True, patience=1).check(
        "Lab", member(model="standalone", cid=["set", []])
    )


def test_a_relay_that_has_lost_its_source_is_not_used() -> None:
    relay = Membership(leader_only=False, patience=1)
    relay.check("Lab", member(model="relay", cid=["set", []]))
    with pytest.raises(Unavailable, match="a relay, has lost the source of database Lab"):
        relay.check("Lab", member(model="relay", cid=["set", []], connected=False))
