"""The records that Python packs have the layout of the structs in the compiled programs."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.drivers.direct.maps import records as layout
from fairlead.drivers.direct.maps.pins import OBJECT
from fairlead.drivers.direct.maps.records import NextHop
from fairlead.drivers.direct.spec import ListenerKey, ListenerProtocol
from fairlead.errors import Refused
from fairlead.model import ServiceKey
from fairlead.net.address import canonical
from fairlead.net.elf import read_object

TYPES = read_object(OBJECT).types

RECORDS = {
    "listener_key": layout.LISTENER_KEY,
    "listener": layout.LISTENER,
    "next_hop": layout.NEXT_HOP,
    "owner": layout.OWNER,
    "node_name": layout.NODE_NAME,
    "settings": layout.SETTINGS,
    "node_traffic": layout.NODE_TRAFFIC,
    "range_key": layout.RANGE_KEY,
    "retained_node": layout.RETAINED_NODE,
    "share": layout.SHARE,
}


@pytest.mark.parametrize(("name", "packed"), RECORDS.items())
def test_records_have_the_sizes_of_the_structs(name: str, packed: struct.Struct) -> None:
    assert packed.size == TYPES.struct_size(name)


@pytest.mark.parametrize(("name", "packed"), RECORDS.items())
def test_records_have_the_offsets_of_the_structs(name: str, packed: struct.Struct) -> None:
    """Each value, when only it is set, appears at the offset of the field of the same position."""
    fields = [field for field in TYPES.fields(name) if field.name != "pad"]
    blank = packed.unpack(bytes(packed.size))
    assert len(fields) == len(blank)
    for i, field in enumerate(fields):
        marked = list(blank)
        marked[i] = b"\xff" if isinstance(blank[i], bytes) else 0xFF
        data = packed.pack(*marked)
        assert data.index(b"\xff") == field.offset


def test_constants_equal_those_of_the_programs() -> None:
    assert TYPES.struct_size("chunk") == layout.CHUNK_BYTES
    events = TYPES.enumerators("event")
    assert (
        tuple(name.lower() for name, value in events.items() if value < events["DROPS"])
        == layout.DROPS
    )
    assert layout.TRAFFIC.size == TYPES.struct_size("traffic")
    assert {
        name: getattr(layout, name) for name in TYPES.enumerators("forwarding")
    } == TYPES.enumerators("forwarding")


@given(
    st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)),
    st.integers(1, 65535),
    st.sampled_from(["TCP", "UDP", "SCTP"]),
)
def test_packed_listener_keys_are_unpacked_unchanged(
    address: object, port: int, protocol: ListenerProtocol
) -> None:
    key = ListenerKey(canonical(str(address)), port, protocol)
    assert layout.unpack_listener_key(layout.pack_listener_key(key)) == key


def test_packed_records_are_unpacked_unchanged() -> None:
    link = NextHop(
        layout.LINK,
        4,
        "192.0.2.1",
        mac=b"\x02\0\0\0\0\1",
        own_mac=b"\x02\0\0\0\0\2",
        mtu=1500,
        tag=7,
    )
    for next_hop in (
        NextHop(),
        link,
        NextHop(layout.VXLAN, 5, "2001:db8::1", "2001:db8::2", "2001:db8::3", vni=7471),
    ):
        assert layout.unpack_next_hop(layout.pack_next_hop(next_hop)) == next_hop
    owner = ServiceKey("n" * 63, "s" * 63), "01234567-89ab-cdef-0123-456789abcdef"
    assert layout.unpack_owner(layout.pack_owner(*owner)) == owner


def test_a_name_that_is_too_long_is_refused() -> None:
    with pytest.raises(Refused, match="longer than 64 bytes"):
        layout.pack_owner(ServiceKey("default", "x" * 65), "")
