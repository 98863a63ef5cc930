"""Multicast memberships that the kernel holds without a process."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from fairlead.lab import namespace
from fairlead.net.interfaces import links, present
from fairlead.net.memberships import join, joined, leave
from fairlead.net.rtnetlink import RtnetlinkSocket

pytestmark = pytest.mark.root

NAMESPACE = f"flt-{os.getpid()}-memberships"
GROUP = "ff02::1:ff00:1234"
FRAMES = "33:33:ff:00:12:34"


def ip(*words: str) -> str:
    command = ["ip", "-n", NAMESPACE, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout


def members() -> str:
    return ip("maddress", "show", "dev", "eth0")


@pytest.fixture(name="kernel")
def made_kernel() -> Iterator[RtnetlinkSocket]:
    namespace.create(NAMESPACE)
    try:
        ip("link", "add", "eth0", "type", "veth", "peer", "name", "peer")
        ip("link", "set", "eth0", "up")
        with namespace.inside(NAMESPACE):
            made = RtnetlinkSocket()
            yield made
            made.close()
    finally:
        namespace.delete(NAMESPACE)


def test_a_membership_outlives_the_connection_and_a_link_that_goes_down(
    kernel: RtnetlinkSocket,
) -> None:
    index = links()["eth0"].index
    assert join(kernel, index, "eth0", GROUP)
    assert join(kernel, index, "eth0", GROUP), "joining again changes nothing"
    assert list(joined(kernel)) == [(index, GROUP)]
    kernel.close()
    assert f"inet6 {GROUP}" in members()
    assert FRAMES in members()
    assert all(
        "ff02" not in address for each in present(routes=False) for address in each.addresses
    )
    assert GROUP not in ip("-6", "route", "show", "table", "main")
    ip("link", "set", "eth0", "down")
    ip("link", "set", "eth0", "up")
    assert f"inet6 {GROUP}" in members()


def test_leaving_removes_the_membership_and_may_be_repeated(kernel: RtnetlinkSocket) -> None:
    index = links()["eth0"].index
    join(kernel, index, "eth0", GROUP)
    for _ in range(2):
        leave(kernel, index, "eth0", GROUP)
        assert GROUP not in members()
        assert FRAMES not in members()
        assert list(joined(kernel)) == []


def test_without_ipv6_the_interface_still_receives_the_frames(kernel: RtnetlinkSocket) -> None:
    index = links()["eth0"].index
    namespace.set_sysctls(NAMESPACE, {"net/ipv6/conf/eth0/disable_ipv6": 1})
    assert not join(kernel, index, "eth0", GROUP)
    assert FRAMES in members()
    leave(kernel, index, "eth0", GROUP)
    assert FRAMES not in members()


def test_an_interface_that_is_gone_raises_an_error_and_is_left_without_one(
    kernel: RtnetlinkSocket,
) -> None:
    with pytest.raises(OSError, match=r".*"):
        join(kernel, 9999, "eth9", GROUP)
    leave(kernel, 9999, "eth9", GROUP)
