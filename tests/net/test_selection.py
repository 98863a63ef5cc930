"""The interfaces that selectors choose, as tables. `tests/drivers/direct/test_selection.py` uses
real interfaces."""

import pytest

from fairlead.net.selection import Present, check, of_host, select

HOST = (
    Present("lo", ("127.0.0.1", "::1", "203.0.113.1")),
    Present("eth0", ("192.0.2.1", "2001:db8::1"), default_route=True),
    Present("eth1", ("198.51.100.1", "fe80::1")),
    Present("bond0"),
    Present("bond0.7", ("192.0.2.129",)),
    Present("eth1x", (), default_route=True),
)


@pytest.mark.parametrize(
    ("selectors", "names"),
    [
        (["eth1"], ["eth1"]),
        (["lo"], ["lo"]),
        (["eth*"], ["eth0", "eth1", "eth1x"]),
        (["eth?"], ["eth0", "eth1"]),
        (["eth[1-9]"], ["eth1"]),
        (["bond0.*"], ["bond0.7"]),
        (["*"], ["eth0", "eth1", "bond0", "bond0.7", "eth1x"]),
        (["192.0.2.0/24"], ["eth0", "bond0.7"]),
        (["192.0.2.0/25"], ["eth0"]),
        (["2001:db8::/64"], ["eth0"]),
        (["203.0.113.0/24", "eth1"], ["eth1"]),
        (["0.0.0.0/0"], ["eth0", "eth1", "bond0.7"]),
        (["default-route"], ["eth0", "eth1x"]),
        (["eth1", "default-route", "eth*"], ["eth1", "eth0", "eth1x"]),
        (["ens*", "eth0"], ["eth0"]),
        ([], []),
    ],
)
def test_selectors_choose_interfaces(selectors: list[str], names: list[str]) -> None:
    selection = select(selectors, HOST)
    assert list(selection.names) == names
    assert not selection.problem


@pytest.mark.parametrize(
    ("selectors", "words"),
    [
        (
            ["eth9"],
            "there is no interface eth9; this host has lo (127.0.0.1, ::1, 203.0.113.1), eth0 "
            "(192.0.2.1, 2001:db8::1, ",
        ),
        (["eth0", "eth8", "eth9"], "there is no interface eth8, eth9; this host has "),
        (["ens*", "10.0.0.0/8"], "no interface matches ens*, 10.0.0.0/8; this host has "),
        (["eth9", "eth*"], "there is no interface eth9; "),
        (
            ["ens*"],
            "eth0 (192.0.2.1, 2001:db8::1, default route), eth1 (198.51.100.1, fe80::1), bond0 "
            "(no address), ",
        ),
    ],
)
def test_the_message_names_missing_and_present_interfaces(selectors: list[str], words: str) -> None:
    assert words in select(selectors, HOST).problem


def test_a_host_with_many_interfaces_does_not_list_them_all() -> None:
    problem = select(["eth9"], [Present(f"veth{number}") for number in range(300)]).problem
    assert problem.endswith("veth19 (no address) and 280 more")
    assert select(["eth9"], []).problem.endswith("this host has no interface")


def test_a_brief_loss_of_an_address_deselects_no_interface() -> None:
    selectors = ["192.0.2.0/25", "default-route", "bond*"]
    before = select(selectors, HOST)
    bare = tuple(Present(each.name) for each in HOST)
    without = select(selectors, bare, before)
    assert without.chosen == before.chosen
    assert select(selectors, bare).unmatched == ("192.0.2.0/25", "default-route")
    moved = (*bare, Present("eth7", ("192.0.2.1",)))
    assert select(selectors, moved, without).chosen["192.0.2.0/25"] == ("eth7",)
    gone = tuple(each for each in bare if each.name != "eth0")
    assert select(selectors, gone, without).chosen == {
        "192.0.2.0/25": (),
        "default-route": ("eth1x",),
        "bond*": ("bond0", "bond0.7"),
    }


@pytest.mark.parametrize(
    "text", ["eth0", "eth0.100", "br-lan", "eth*", "192.0.2.0/24", "2001:db8::/32", "default-route"]
)
def test_valid_selectors_are_accepted(text: str) -> None:
    check(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("an interface", "no space"),
        ("averyverylongname", "at most 15 characters"),
        ("192.0.2.1", "write it as a CIDR"),
        ("2001:db8::1", "write it as a CIDR"),
        ("192.0.2.1/24", "has host bits set"),
        ("eth0/1", "is not a CIDR"),
        ("10.0.0.0/016", r"the prefix length of 10.0.0.0/016 begins with 0 \(write 10.0.0.0/16\)"),
        ("10.0.0.0/255.0.0.0", "'255.0.0.0' in 10.0.0.0/255.0.0.0 is not a prefix length"),
        ("::ffff:10.0.0.0/104", "is an IPv4-mapped IPv6 address"),
    ],
)
def test_a_selector_that_cannot_match_is_rejected(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(text)


def test_the_most_specific_value_for_a_host_takes_precedence() -> None:
    by_host = {"edge-*": "edge", "edge-1*": "ten", "edge-11": "eleven", "*": "any"}
    assert [
        of_host(host, "all", by_host) for host in ("edge-2", "edge-12", "edge-11", "node1")
    ] == [
        "edge",
        "ten",
        "eleven",
        "any",
    ]
    assert of_host("node1", "all", {"edge-*": "edge"}) == "all"
