"""Network namespaces: created like by `ip netns`, entered temporarily, and removed completely."""

import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from fairlead.errors import Conflict, Unavailable
from fairlead.lab import namespace

pytestmark = pytest.mark.root


def current() -> str:
    return os.readlink("/proc/thread-self/ns/net")


def test_ip_netns_sees_it_and_can_run_in_it(netns: str) -> None:
    assert (
        netns
        in subprocess.run(
            ["ip", "netns"], capture_output=True, text=True, check=True
        ).stdout.split()
    )
    inside = subprocess.run(
        ["ip", "netns", "exec", netns, "ip", "-br", "link"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert inside.stdout.startswith("lo ")
    assert "eth0" not in inside.stdout


def test_entering_changes_one_thread_for_one_block(netns: str) -> None:
    home = current()
    seen: list[str] = []
    with namespace.inside(netns):
        there = current()
        other = threading.Thread(target=lambda: None)
        assert there != home
    with pytest.raises(ZeroDivisionError), namespace.inside(netns):
        raise ZeroDivisionError
    assert current() == home
    other.start()
    other.join()
    thread = threading.Thread(target=lambda: seen.append(current()))
    thread.start()
    thread.join()
    assert seen == [home]


def test_a_socket_stays_in_the_namespace_in_which_it_was_created(netns: str) -> None:
    namespace.set_sysctls(netns, {"net/ipv4/ip_nonlocal_bind": 1})
    with namespace.make_socket(netns) as sock:
        sock.bind(("192.0.2.77", 0))
    with socket.socket() as sock, pytest.raises(OSError, match="Cannot assign"):
        sock.bind(("192.0.2.77", 0))


def test_sysctls_are_separate_for_each_namespace(netns: str) -> None:
    before = Path("/proc/sys/net/ipv4/ip_forward").read_text()
    namespace.set_sysctls(netns, {"net/ipv4/ip_forward": 1, "net/ipv6/conf/all/forwarding": 1})
    with namespace.inside(netns):
        assert Path("/proc/sys/net/ipv4/ip_forward").read_text() == "1\n"
    assert Path("/proc/sys/net/ipv4/ip_forward").read_text() == before
    with pytest.raises(Unavailable, match="net/ipv4/no_such_thing"):
        namespace.set_sysctls(netns, {"net/ipv4/no_such_thing": 1})


def test_a_namespace_cannot_be_created_twice(netns: str) -> None:
    with pytest.raises(Conflict, match="exists already"):
        namespace.create(netns)
    assert netns in namespace.names("flt-")


def test_deleting_leaves_nothing_and_may_be_repeated() -> None:
    name = f"flt-{os.getpid()}-gone"
    namespace.create(name)
    for _ in range(2):
        namespace.delete(name)
        assert not namespace.path(name).exists()
        assert name not in Path("/proc/self/mountinfo").read_text()
    with pytest.raises(Conflict, match="does not exist"), namespace.inside(name):
        pass


def test_an_incompletely_created_namespace_can_be_deleted() -> None:
    name = f"flt-{os.getpid()}-half"
    namespace.path(name).touch()
    namespace.delete(name)
    assert not namespace.path(name).exists()
