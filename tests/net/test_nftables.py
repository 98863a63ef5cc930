"""libnftables in this process, in a separate network namespace."""

import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from fairlead.errors import Conflict, FairleadError, Refused, Unavailable
from fairlead.lab import namespace
from fairlead.net.nftables import Nftables, failure

pytestmark = pytest.mark.root


@pytest.fixture
def nft() -> Iterator[Nftables]:
    name = f"flt-{os.getpid()}-nft"
    namespace.create(name)
    try:
        with namespace.inside(name):
            made = Nftables()
        yield made
        made.close()
    finally:
        namespace.delete(name)


def test_a_transaction_is_atomic(nft: Nftables) -> None:
    nft.run("add table inet t; add set inet t s { type inet_service; }")
    with pytest.raises(Conflict, match="No such file or directory"):
        nft.run("add element inet t s { 1, 2 }\ndelete element inet t s { 9 }")
    assert nft.listing("list set inet t s")[0]["set"].get("elem") is None  # type: ignore[attr-defined]
    nft.run("add element inet t s { 1, 2, 9 }\ndelete element inet t s { 9 }")
    assert nft.listing("list set inet t s")[0]["set"]["elem"] == [1, 2]  # type: ignore[index]


def test_a_check_changes_nothing(nft: Nftables) -> None:
    nft.check("add table inet t")
    assert nft.listing("list tables") == []
    with pytest.raises(Refused, match="syntax error"):
        nft.check("add tabel inet t")


def test_a_context_belongs_to_the_namespace_in_which_it_was_created(nft: Nftables) -> None:
    nft.run("add table inet only_there")
    assert "only_there" in nft.run("list tables")
    with Nftables() as here:
        assert "only_there" not in here.run("list tables")


def test_threads_with_contexts_of_their_own_take_turns() -> None:
    """Without the lock, rules with `iif` are rejected ("Interface does not exist") or the process
    crashes within a second or two."""
    name = f"flt-{os.getpid()}-nft-threads"
    namespace.create(name)
    try:
        with namespace.inside(name):
            contexts = [Nftables() for _ in range(3)]

        def work(number: int) -> int:
            table, nft = f"inet t{number}", contexts[number]
            nft.run(f"add table {table}; add chain {table} c")
            for _ in range(300):
                nft.run(
                    f"flush chain {table} c; add rule {table} c iif lo oif lo tcp dport {{ 1, 2 "
                    f"}} accept"
                )
                nft.listing(f"list table {table}")
            return number

        with ThreadPoolExecutor(len(contexts)) as threads:
            assert list(threads.map(work, range(len(contexts)))) == [0, 1, 2]
        for each in contexts:
            each.close()
    finally:
        namespace.delete(name)


def test_too_many_open_files_are_an_error(nft: Nftables) -> None:
    """A context that was created before continues to work. The library itself would abort the
    process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    with ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        while files.enter_context(open(os.devnull)).fileno() < 1100:
            pass
        with pytest.raises(Unavailable, match="files are open"):
            Nftables()
        assert nft.run("list tables") == ""


def test_protocols_are_numbers(nft: Nftables) -> None:
    nft.run(
        "add table inet t; add set inet t s { type inet_proto . inet_service; }; add element "
        "inet t s { tcp . 80 }"
    )
    assert nft.listing("list set inet t s")[0]["set"]["elem"] == [{"concat": [6, 80]}]  # type: ignore[index]


def test_a_closed_context_cannot_be_used(nft: Nftables) -> None:
    nft.close()
    nft.close()
    with pytest.raises(RuntimeError, match="closed"):
        nft.run("list tables")


def test_errors_are_short_however_long_the_command(nft: Nftables) -> None:
    elements = ", ".join(str(n) for n in range(5000))
    with pytest.raises(Conflict) as raised:
        nft.run(f"add element inet nowhere s {{ {elements} }}")
    assert len(str(raised.value)) < 400
    assert "nowhere" in str(raised.value)
    assert "No such file or directory" in str(raised.value)


@pytest.mark.parametrize(
    ("nft_message", "kind"),
    [
        ("<cmd>:1:1-9: Error: Could not process rule: Operation not permitted", Refused),
        ("Error: Could not process rule: File exists", Conflict),
        ("Error: Could not process rule: Device or resource busy", Conflict),
        ("Error: Could not process rule: Operation not supported", Refused),
        ("Error: syntax error, unexpected newline", Refused),
        ("Error: Could not process rule: Cannot allocate memory", Unavailable),
        ("netlink: Error: cache initialization failed: Interrupted system call", Unavailable),
        ("", Unavailable),
    ],
)
def test_errors_for_nfts_messages(nft_message: str, kind: type[FairleadError]) -> None:
    error = failure("add table inet t", nft_message)
    assert type(error) is kind
    assert "add table inet t" in str(error)
