"""BIRD accepts the configuration that a gateway writes for any section `announce.bgp`."""

import subprocess
from pathlib import Path

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
    return BgpConfig(draw(NUMBERS), tuple(routers), router_id=router_id), passwords


@settings(max_examples=20)
@given(given_one=sections())
def test_bird_accepts_every_configuration(
    bird: Path, given_one: tuple[BgpConfig, dict[str, str]]
) -> None:
    section, passwords = given_one
    text = configuration(section, passwords, table=7470100)
    done = subprocess.run(
        [bird, "-p", "-c", "/dev/stdin"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), text


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
