"""BIRD accepts the configuration that a gateway writes for any section `announce.bgp`."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.drivers.bgp.render import configuration
from fairlead.sections import BfdConfig, BgpConfig, BgpPeerConfig

NUMBERS = st.integers(1, 65534) | st.integers(1, 4294967294)
PASSWORDS = st.text("".join(map(chr, range(32, 127))).replace('"', ""), max_size=80)


@st.composite
def sections(draw: st.DrawFn) -> tuple[BgpConfig, dict[str, str]]:
    routers, passwords = [], {}
    for number in range(1, draw(st.integers(1, 6)) + 1):
        name = f"{draw(st.from_regex('[a-z][-a-z0-9]{0,30}', fullmatch=True))}{number}"
        address = draw(st.sampled_from((f"192.0.2.{number}", f"2001:db8::{number}")))
        bfd = draw(st.none() | st.builds(BfdConfig, st.integers(10, 10_000), st.integers(2, 50)))
        restart = draw(st.sampled_from((None, False) if bfd is None else (None, False, True)))
        times = draw(st.sampled_from(((9, 3), (3, 1), (65_535, 21_845))))
        routers.append(BgpPeerConfig(name, address, draw(NUMBERS), "", bfd, restart, *times))
        passwords[name] = draw(PASSWORDS)
    router_id = draw(st.sampled_from(("", "192.0.2.1", "0.0.0.1")))
    networks = tuple(draw(st.sets(st.sampled_from(("203.0.113.0/24", "10.0.0.1/32", "fd00::/8")))))
    section = BgpConfig(draw(NUMBERS), tuple(routers), router_id=router_id, networks=networks)
    return section, passwords


@settings(max_examples=20)
@given(given_one=sections())
def test_bird_accepts_every_configuration(
    bird: Path, given_one: tuple[BgpConfig, dict[str, str]]
) -> None:
    section, passwords = given_one
    text = configuration(section, passwords, table=7470100)
    check(bird, text)


def check(bird: Path, text: str) -> None:
    """Assert that BIRD accepts this configuration."""
    done = subprocess.run(
        [bird, "-p", "-c", "/dev/stdin"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), text


@pytest.mark.parametrize("suffix", ["", "4", "6"])
def test_no_name_of_a_router_is_that_of_another_part(bird: Path, suffix: str) -> None:
    names = [f"{each}{suffix}" for each in ("bfd", "routes", "kernel", "out")]
    routers = [
        BgpPeerConfig(name, f"{network}{number}", 1, bfd=BfdConfig())
        for number, name in enumerate(names, 1)
        for network in ("192.0.2.", "2001:db8::")
        if (network == "192.0.2.") == (number % 2 == 1)
    ]
    text = configuration(BgpConfig(2, tuple(routers)), {}, table=7)
    check(bird, text)


def test_a_router_restarts_gracefully_only_with_bfd() -> None:
    for bfd, given_one, expected in (
        (None, None, "off"),
        (BfdConfig(), None, "on"),
        (BfdConfig(), False, "off"),
    ):
        router = BgpPeerConfig("a", "192.0.2.1", 1, bfd=bfd, graceful_restart=given_one)
        text = configuration(BgpConfig(2, (router,)), {}, table=7)
        assert f"    graceful restart {expected};\n" in text
        assert ("graceful restart wait 5;\n" in text) == (expected == "on")


def test_only_single_addresses_are_announced_and_no_route_is_accepted() -> None:
    routers = (BgpPeerConfig("a", "192.0.2.1", 1), BgpPeerConfig("b", "2001:db8::1", 1))
    text = configuration(BgpConfig(2, routers), {}, table=7)
    assert "if net ~ [ 0.0.0.0/0{32,32} ] then accept;" in text
    assert "if net ~ [ ::/0{128,128} ] then accept;" in text
    assert text.count("import none;") == 2
    assert text.count("export none;") == 2
    section = BgpConfig(2, routers, networks=("203.0.113.0/24", "198.51.100.0/24"))
    text = configuration(section, {}, table=7)
    assert "if net ~ [ 203.0.113.0/24{32,32}, 198.51.100.0/24{32,32} ] then accept;" in text
    assert text.count("accept;") == 1, "no address of the other family is announced"
