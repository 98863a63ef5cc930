"""Elements as bytes: they equal the bytes that nft sends to the kernel, and reading them returns
the same elements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.drivers.nodeproxy.conftest import install
from tests.drivers.nodeproxy.test_driver import EVERYTHING, without_external_ips

from fairlead.drivers.nodeproxy import Element, NodeProxyDriver
from fairlead.drivers.nodeproxy.elements import NO_SERVICE, canonical, command, parsed
from fairlead.drivers.nodeproxy.wire import decode, encode
from fairlead.net.nfelements import changing, listed
from fairlead.net.nftables import Nftables

ipv4 = st.ip_addresses(v=4).map(str)
ipv6 = st.ip_addresses(v=6).map(str).map(canonical)
ports = st.integers(1, 65535)
protocols = st.sampled_from([6, 17, 132])
frontends = st.one_of(
    st.tuples(st.just("4"), st.builds("{} . {} . {}".format, ipv4, protocols, ports)),
    st.tuples(st.just("6"), st.builds("{} . {} . {}".format, ipv6, protocols, ports)),
)


@given(frontends, ipv4, ipv6, ports, st.integers(0, 999))
def test_an_encoded_element_is_decoded_unchanged(
    frontend: tuple[str, str], four: str, six: str, port: int, slot: int
) -> None:
    family, key = frontend
    pod = four if family == "4" else six
    for element in (
        Element(f"services{family}", key, "goto pick_local_12", "a-namespace/a-name"),
        Element(f"outside{family}", key, "drop"),
        Element(f"restricted{family}", key),
        Element(f"recall{family}", key, f"jump recall{family}_12"),
        Element(f"affinity{family}_12", f"{key} . {pod}", f"{pod} . {port}"),
        Element(f"endpoints{family}_1000", f"{key} . {slot}", f"{pod} . {port}"),
        Element(f"local_endpoints{family}_7", f"{key} . {slot}", f"{pod} . {port}"),
        Element(f"hairpin{family}", f"{key} . {pod} . {pod}"),
        Element(f"flows{family}", f"{key} . {pod} . {port}"),
        Element(f"cluster_ips{family}", pod, "", "a-namespace/a-name"),
        Element(f"allowed{family}", f"{key} . {'10.0.0.1' if family == '4' else '::ffff:a00:1'}"),
        Element(
            f"allowed{family}", f"{key} . {'10.0.0.0/8' if family == '4' else '2001:db8::/33'}"
        ),
        Element(
            f"allowed{family}", f"{key} . {'10.0.0.1-10.0.0.9' if family == '4' else '::1-::9'}"
        ),
    ):
        (body,) = changing("fairlead", element.map, [encode(element)])
        assert [decode(element.map, each) for each in listed(body)] == [element]


def test_elements_are_divided_over_several_messages() -> None:
    elements = [
        Element("flows4", f"192.0.2.1 . 17 . 53 . 10.0.{number // 250}.{number % 250} . 53")
        for number in range(4000)
    ]
    bodies = list(changing("fairlead", "flows4", map(encode, elements)))
    assert len(bodies) == 3
    assert max(map(len, bodies)) < 1 << 16
    assert [decode("flows4", each) for body in bodies for each in listed(body)] == elements


@pytest.mark.root
async def test_elements_are_exchanged_with_nft_unchanged(driver: NodeProxyDriver) -> None:
    services = without_external_ips(*EVERYTHING)
    await install(driver, *services)
    desired = driver.render({each.service: each for each in services})
    with Nftables() as nft:
        seen = parsed(
            record
            for record in nft.listing("list table inet fairlead")
            if named(record) not in ("pods4", "pods6")
        )
        assert seen == desired
        by_map: dict[str, list[Element]] = {}
        for element in sorted(element for spec in desired.values() for element in spec):
            by_map.setdefault(element.map, []).append(element)
        anew = "".join(
            f"{command(verb, *each)}\n" for verb in ("delete", "add") for each in by_map.items()
        )
        nft.run(anew)
        strange = Element("services4", "192.0.2.9 . 6 . 80", "accept")
        nft.run(command("add", strange.map, [strange]))
    read_again = dict(await driver.read(None))
    (left,) = read_again.pop(NO_SERVICE)
    assert read_again == desired
    assert left.key == strange.key
    await driver.apply(driver.diff(desired, await driver.read(None)))
    assert await driver.read(None) == desired


def named(record: object) -> str:
    """Return the name of the set or map in a listing."""
    match record:
        case {"map": {"name": str(name)}} | {"set": {"name": str(name)}}:
            return name
    return ""
