"""Multicast memberships that the kernel holds without a process."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from fairlead.lab import namespace
from fairlead.net.interfaces import links
from fairlead.net.memberships import join, leave
from fairlead.net.rtnetlink import RtnetlinkSocket

NAMESPACE = f"flt-{os.getpid()}-memberships"
GROUP = "ff02::1:ff00:1234"


def ip(*words: str) -> str:
    command = ["ip", "-n", NAMESPACE, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout


@pytest.fixture
def index() -> Iterator[int]:
    namespace.create(NAMESPACE)
    try:
        ip("link", "add", "eth0", "type", "veth", "peer", "name", "peer")
        ip("link", "set", "eth0", "up")
        with namespace.inside(NAMESPACE):
            yield links()["eth0"].index
    finally:
        namespace.delete(NAMESPACE)


def members() -> str:
    return ip("maddress", "show", "dev", "eth0")


def test_a_membership_outlives_the_connection_and_a_link_that_goes_down(index: int) -> None:
    kernel = RtnetlinkSocket()
    assert join(kernel, index, "eth0", GROUP)
    assert join(kernel, index, "eth0", GROUP), "joining again changes nothing"
    kernel.close()
    assert f"inet6 {GROUP}" in members()
    assert "33:33:ff:00:12:34" in members()
    ip("link", "set", "eth0", "down")
    ip("link", "set", "eth0", "up")
    assert f"inet6 {GROUP}" in members()


def test_leaving_removes_the_membership_and_may_be_repeated(index: int) -> None:
    kernel = RtnetlinkSocket()
    join(kernel, index, "eth0", GROUP)
    for _ in range(2):
        leave(kernel, index, "eth0", GROUP)
        assert GROUP not in members()
        assert "33:33:ff:00:12:34" not in members()
    kernel.close()


def test_without_ipv6_the_interface_still_receives_the_frames(index: int) -> None:
    namespace.set_sysctls(NAMESPACE, {"net/ipv6/conf/eth0/disable_ipv6": 1})
    kernel = RtnetlinkSocket()
    assert not join(kernel, index, "eth0", GROUP)
    assert "33:33:ff:00:12:34" in members()
    leave(kernel, index, "eth0", GROUP)
    assert "33:33:ff:00:12:34" not in members()
    kernel.close()


def test_an_interface_that_is_gone_raises_an_error_and_is_left_without_one(index: int) -> None:
    kernel = RtnetlinkSocket()
    with pytest.raises(OSError, match=r".*"):
        join(kernel, 9999, "eth9", GROUP)
    leave(kernel, 9999, "eth9", GROUP)
    kernel.close()
