"""The records as Python packs them are those that the object was compiled with."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.drivers.direct import layout
from fairlead.drivers.direct.layout import NodeRecord
from fairlead.drivers.direct.pins import OBJECT
from fairlead.drivers.direct.spec import ListenerKey, ListenerProtocol, canonical
from fairlead.errors import Refused
from fairlead.model import ServiceKey
from fairlead.net.elf import read_object

TYPES = read_object(OBJECT).types

RECORDS = {
    "listener_key": layout.LISTENER_KEY,
    "listener": layout.LISTENER,
    "node": layout.NODE,
    "owner": layout.OWNER,
    "node_name": layout.NODE_NAME,
    "settings": layout.SETTINGS,
    "traffic": layout.TRAFFIC,
}


@pytest.mark.parametrize(("name", "packed"), RECORDS.items())
def test_sizes(name: str, packed: struct.Struct) -> None:
    assert packed.size == TYPES.struct_size(name)


@pytest.mark.parametrize(("name", "packed"), RECORDS.items())
def test_offsets(name: str, packed: struct.Struct) -> None:
    """Each value, set alone, shows at the offset of the field of its turn."""
    fields = [field for field in TYPES.fields(name) if field.name != "pad" or name == "settings"]
    blank = packed.unpack(bytes(packed.size))
    assert len(fields) == len(blank)
    for i, field in enumerate(fields):
        marked = list(blank)
        marked[i] = b"\xff" if isinstance(blank[i], bytes) else 0xFF
        data = packed.pack(*marked)
        assert data.index(b"\xff") == field.offset


def test_constants() -> None:
    assert TYPES.struct_size("chunk") == layout.CHUNK_BYTES
    assert TYPES.enumerators("event") == {
        "NO_MEMBER": 0,
        "NO_NEXT_HOP": 1,
        "HOP_LIMIT": 2,
        "FRAGMENT": 3,
        "TRACK_REFUSED": 4,
        "EVENTS": 5,
    }


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)), st.integers(1, 65535), st.sampled_from(["TCP", "UDP"]))
def test_keys_of_listeners_come_back(address: object, port: int, protocol: ListenerProtocol) -> None:
    key = ListenerKey(canonical(str(address)), port, protocol)
    assert layout.unpack_listener_key(layout.pack_listener_key(key)) == key


def test_records_come_back() -> None:
    for record in (NodeRecord(), NodeRecord("192.0.2.1", "2001:db8::1", 4, 5, 1), NodeRecord(ipv6="2001:db8::1", interface6=5)):
        assert layout.unpack_node(layout.pack_node(record)) == record
    owner = ServiceKey("n" * 63, "s" * 63), "01234567-89ab-cdef-0123-456789abcdef"
    assert layout.unpack_owner(layout.pack_owner(*owner)) == owner


def test_a_name_that_is_too_long_is_refused() -> None:
    with pytest.raises(Refused, match="longer than 64 bytes"):
        layout.pack_owner(ServiceKey("default", "x" * 65), "")
