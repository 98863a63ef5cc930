"""Change the product in small ways, and check whether the tests find each change.

`python -m tests.mutations` copies the tree to a scratch directory. There it first runs the named
tests without a change: they must pass. Then it makes each change in turn, rebuilds the eBPF objects
if the change is in bpf/, and runs the tests that should fail, the fastest first. A change that no
test finds has survived: a test is missing. The exit code is 1 if any survived. Options: words that
a change's file or text must contain; `--list` only lists the changes. A change whose old text does
not occur exactly once in its file is rejected before anything runs. The tests of MUTATIONS need no
lab and no built program."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).parent.parent
TIMEOUT_S, GRACE_S = 120, 15
"""A time limit. Tests that exceed it under a change have found the change, which caused an endless
loop."""
COPIED = ("bench", "bpf", "deploy", "docs", "examples", "src", "tests", "tools")
FILES = ("CHANGELOG.md", "Makefile", "README.md", "hatch_build.py", "pyproject.toml", "setup.sh")

Result = Literal["killed", "survived", "does not build"]


class Mutation(NamedTuple):
    """One change: in `file`, `old` becomes `new`. `tests` should find it, the fastest first."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}: {old}  ->  {new or 'nothing'}"


_DIRECT = "tests/drivers/direct/test_"
_PACKETS = (f"{_DIRECT}packets.py",)
_FLOWS = (f"{_DIRECT}flows.py",)
_FLOW_SHARES = (f"{_DIRECT}flow_shares.py",)
_MESSAGES = (f"{_DIRECT}messages.py",)
_FRAGMENTS = (f"{_DIRECT}fragments.py",)
_NEXT_HOPS = (f"{_DIRECT}next_hops.py",)
_MAGLEV = ("tests/net/test_maglev.py",)
_TRANSITION = ("tests/net/test_transition.py",)
_ENDPOINTS = ("tests/plan/test_endpoints.py",)
_MEMBERS = (
    "tests/plan/test_balancer.py",
    "tests/plan/test_notes.py",
    "tests/plan/test_silent_nodes.py",
)
_NODE = (
    "tests/plan/test_node.py",
    "tests/plan/test_proxying.py",
    "tests/plan/test_topology_hints.py",
)
_ELEMENTS = ("tests/drivers/nodeproxy/test_elements.py",)
_TRANSACTIONS = ("tests/drivers/nodeproxy/test_transactions.py",)
_AFFINITY = ("tests/drivers/nodeproxy/test_affinity.py",)
_LIVENESS = ("tests/drivers/test_liveness.py",)

MUTATIONS = (
    # The choice of the node for a packet.
    Mutation("bpf/choose.h", "#define NEAR (1 << 17)", "#define NEAR (1 << 31)", _FLOWS),
    Mutation(
        "bpf/choose.h", "#define DATAGRAM_LIFETIME 280", "#define DATAGRAM_LIFETIME 1", _FLOWS
    ),
    Mutation(
        "bpf/choose.h",
        "	if (!by_source) {",
        "	if (by_source) {",
        (f"{_DIRECT}choice.py", f"{_DIRECT}flows.py"),
    ),
    Mutation(
        "bpf/choose.h",
        "return allowance->used++ < per_s;",
        "return allowance->used++ <= per_s;",
        (*_FLOWS, *_MESSAGES),
    ),
    Mutation(
        "bpf/choose.h",
        "choice->fallback = flow && is_retained(",
        "choice->fallback = flow && !is_retained(",
        _FLOWS,
    ),
    Mutation(
        "bpf/choose.h",
        "		if (inserted && choice->entry)\n			choice->entry->challenged = true;\n",
        "",
        _FLOWS,
    ),
    Mutation(
        "bpf/choose.h",
        "	if (previous == NONE && listener->flags & CONVERGING)\n		previous = TRACKED;\n",
        "",
        (*_FLOWS, f"{_DIRECT}peers.py"),
    ),
    Mutation(
        "bpf/choose.h",
        "		bpf_map_delete_elem(&new_datagrams, key);\n",
        "",
        _FLOWS,
    ),
    Mutation(
        "bpf/choose.h",
        "		report(key, choice->node | CLOSING);",
        "		report(key, choice->node);",
        (f"{_DIRECT}peers.py", *_FLOWS),
    ),
    Mutation(
        "bpf/choose.h",
        ".prefix_length = 32 + 128, .set = set };",
        ".prefix_length = 128, .set = set };",
        (f"{_DIRECT}ranges.py",),
    ),
    Mutation(
        "bpf/shares.h",
        "	if (index == TOTAL || of_all >= usable)\n		return false;\n",
        "",
        _FLOW_SHARES,
    ),
    Mutation(
        "bpf/shares.h",
        "	return of_own < (usable - others) * config->namespace_share >> 16;",
        "	return of_own < usable - others;",
        _FLOW_SHARES,
    ),
    Mutation("bpf/choose.h", "	count_entries(share, shared, -1);\n", "", _FLOW_SHARES),
    Mutation("bpf/choose.h", "shared ? left - left / 4 : left", "left", _FLOW_SHARES),
    Mutation(
        "bpf/listeners.h",
        "	return ours[0] == theirs[0] && ours[1] == theirs[1] && ours[2] == theirs[2];",
        "	return ours[0] == theirs[0] && ours[1] == theirs[1];",
        (f"{_DIRECT}recent.py", f"{_DIRECT}listeners.py", *_PACKETS),
    ),
    Mutation(
        "bpf/address.h",
        "	return !address[0] && !address[1] && address[2] == bpf_htonl(0xffff);",
        "	return address[2] == bpf_htonl(0xffff);",
        (*_NEXT_HOPS, *_PACKETS),
    ),
    # Headers and messages that Fairlead writes.
    Mutation(
        "bpf/hops.h",
        "	ip->check = sum + (sum >= 0xffff);",
        "	ip->check = sum;",
        (*_NEXT_HOPS, *_PACKETS, f"{_DIRECT}blackhole.py"),
    ),
    Mutation(
        "bpf/fragments.h",
        "(30 * 1000000000ULL)",
        "(30 * 1000000000000ULL)",
        _FRAGMENTS,
    ),
    Mutation(
        "bpf/fragments.h",
        ".protocol = packet->ipv6 ? 0 : packet->flow.protocol };",
        ".protocol = packet->flow.protocol };",
        _FRAGMENTS,
    ),
    Mutation(
        "bpf/messages.h",
        "	return first != 0 && first != 127 && first < 224;",
        "	return first != 0 && first != 127;",
        _MESSAGES,
    ),
    Mutation(
        "bpf/messages.h",
        "	icmp->checksum = sum ? sum : 0xffff;",
        "	icmp->checksum = sum;",
        _MESSAGES,
    ),
    Mutation(
        "bpf/outer.h",
        "0x45 << 24 | packet->traffic_class << 16 |",
        "0x45 << 24 |",
        ("tests/drivers/tunnel/test_decapsulator.py", *_NEXT_HOPS),
    ),
    Mutation(
        "bpf/outer.h",
        "	vxlan->vni = bpf_htonl(hop->vni << 8);",
        "	vxlan->vni = bpf_htonl(hop->vni);",
        _NEXT_HOPS,
    ),
    # Maglev tables.
    Mutation(
        "bpf/maglev.c",
        "if (credit[i] < greatest || !left[i])",
        "if (credit[i] <= greatest || !left[i])",
        _MAGLEV,
    ),
    Mutation(
        "bpf/transition.c", "count > is_retained(current, retained_nodes)", "count > 0", _TRANSITION
    ),
    Mutation(
        "bpf/transition.c",
        "	if (old_current != current && is_retained(old_current, retained_nodes))",
        "	if (is_retained(old_current, retained_nodes))",
        _TRANSITION,
    ),
    Mutation(
        "src/fairlead/net/maglev.py",
        "    if skip % MIN_SIZE == 0:\n        skip += 2\n",
        "",
        _MAGLEV,
    ),
    Mutation(
        "src/fairlead/net/maglev.py",
        "key=lambda i: -shares[i][1])",
        "key=lambda i: shares[i][1])",
        _MAGLEV,
    ),
    Mutation(
        "src/fairlead/net/maglev.py",
        "    if len(members) > MAX_NODES:",
        "    if len(members) >= MAX_NODES:",
        _MAGLEV,
    ),
    Mutation(
        "src/fairlead/net/transition.py",
        "        or len(retained_nodes) < 2\n",
        "",
        _TRANSITION,
    ),
    Mutation(
        "src/fairlead/net/transition.py",
        "    crossed = not own.by_source == by_source == other.previous_by_source\n",
        "    crossed = False\n",
        (*_TRANSITION, f"{_DIRECT}peers.py"),
    ),
    # The choice of endpoints and members.
    Mutation(
        "src/fairlead/plan/endpoints.py",
        "    return not node, not ready, terminating, not serving, node,",
        "    return not node, not ready, not terminating, not serving, node,",
        _ENDPOINTS,
    ),
    Mutation(
        "src/fairlead/plan/endpoints.py",
        "if candidate.serving and candidate.terminating]",
        "if candidate.serving]",
        _ENDPOINTS,
    ),
    Mutation(
        "src/fairlead/plan/endpoints.py",
        "    if not all(each.ready and each.hints for each in chosen):",
        "    if not all(each.hints for each in chosen):",
        (*_ENDPOINTS, "tests/plan/test_topology_hints.py"),
    ),
    Mutation(
        "src/fairlead/plan/members.py",
        "    return label is not None and label not in INCLUDED",
        "    return label is not None",
        _MEMBERS,
    ),
    Mutation(
        "src/fairlead/plan/members.py",
        '        if port.protocol != "UDP"\n',
        '        if port.protocol == "TCP"\n',
        _MEMBERS,
    ),
    Mutation(
        "src/fairlead/plan/members.py",
        "each in verdicts and each not in answering else each",
        "each in verdicts else each",
        _MEMBERS,
    ),
    Mutation(
        "src/fairlead/plan/node.py",
        'if entry.ip and entry.ip_mode != "Proxy"]',
        "if entry.ip]",
        _NODE,
    ),
    Mutation(
        "src/fairlead/plan/node.py",
        "max(by_family.values(), default=0)",
        "sum(by_family.values())",
        _NODE,
    ),
    Mutation(
        "src/fairlead/plan/node.py",
        "(port.port, port.protocol) not in without",
        "port.port not in {number for number, _ in without}",
        _NODE,
    ),
    # The nftables elements of a node, and the liveness of nodes.
    Mutation(
        "src/fairlead/drivers/nodeproxy/elements.py",
        '    return "drop" if anywhere else "goto refuse"',
        '    return "goto refuse"',
        _ELEMENTS,
    ),
    Mutation(
        "src/fairlead/drivers/nodeproxy/elements.py",
        "        vips = {address for port in intent.ports for address in port.load_balancer_ips}\n",
        "        vips: set[str] = set()\n",
        _ELEMENTS,
    ),
    Mutation(
        "src/fairlead/drivers/nodeproxy/transactions.py",
        '            all(c.verb == "add" for c in group),\n',
        "",
        _TRANSACTIONS,
    ),
    Mutation(
        "src/fairlead/drivers/nodeproxy/transactions.py",
        "    return found._replace(basis=Basis.OWN) if address in wanted else found",
        "    return found",
        (*_TRANSACTIONS, "tests/drivers/nodeproxy/test_contested.py"),
    ),
    Mutation(
        "src/fairlead/drivers/nodeproxy/affinity.py",
        "                    self._users[number] -= 1\n",
        "                    pass\n",
        _AFFINITY,
    ),
    Mutation(
        "src/fairlead/drivers/liveness.py",
        "self.failures = 1 if now_s - self.since_s >= STABLE_S else self.failures + 1",
        "self.failures = self.failures + 1",
        _LIVENESS,
    ),
    Mutation(
        "src/fairlead/drivers/liveness.py",
        "        if record is None or record.silent < SILENCES:\n            self._silences += 1",
        "        self._silences += 1",
        _LIVENESS,
    ),
    Mutation(
        "src/fairlead/drivers/liveness.py",
        "    if answer.weight != 0:  # a target that reports zero endpoints has not failed\n"
        "        record.record_failure(now_s)",
        "    record.record_failure(now_s)",
        _LIVENESS,
    ),
)


class Refusal(Exception):
    """The mutations cannot be applied."""


def check(mutations: Sequence[Mutation], root: Path) -> None:
    """Raise Refusal unless each old text occurs in its file once, and each test file exists."""
    wrong = []
    for each in mutations:
        file = root / each.file
        times = file.read_text().count(each.old) if file.exists() else 0
        if times != 1:
            wrong.append(f"{each}\n  the old text occurs {times} times")
        if each.old == each.new:
            wrong.append(f"{each}\n  changes nothing")
        wrong += [
            f"{each}\n  {test} does not exist" for test in each.tests if not (root / test).exists()
        ]
    if wrong:
        raise Refusal("\n".join(wrong))


@contextmanager
def scratch(root: Path) -> Iterator[Path]:
    """Create a copy of the tree with its built objects, which is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="fairlead-mutations-") as name:
        copy = Path(name)
        ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
        for folder in COPIED:
            shutil.copytree(root / folder, copy / folder, ignore=ignored)
        for file in FILES:
            shutil.copy2(root / file, copy / file)
        yield copy


def environment(copy: Path) -> dict[str, str]:
    """Return the environment in which the copy's modules precede those of the installed tree."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(copy / "src"), str(copy))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def passes(copy: Path, tests: Sequence[str]) -> bool:
    """Return whether the tests pass in the copy, of which only those run that `make test` runs.
    Tests that do not end within TIMEOUT_S do not pass."""
    options = ("-q", "-x", "--check", "-m", "not soak", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *options, *tests]
    with subprocess.Popen(
        command,
        cwd=copy,
        env=environment(copy),
        stdout=(copy / "output").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as running:
        try:
            return running.wait(TIMEOUT_S) == 0
        except subprocess.TimeoutExpired:
            # After SIGINT, the tests delete their namespaces.
            os.killpg(running.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                running.wait(GRACE_S)
            return False
        finally:
            # This is also necessary if this program is interrupted.
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)


def builds(copy: Path) -> bool:
    """Rebuild the eBPF objects of the copy. Return whether that succeeded."""
    command = [sys.executable, "hatch_build.py"]
    return subprocess.run(command, cwd=copy, capture_output=True, check=False).returncode == 0


@contextmanager
def applied(mutation: Mutation, copy: Path) -> Iterator[bool]:
    """Make the change in the copy, and revert it at the end. Yield False if it does not build."""
    file = copy / mutation.file
    text = file.read_text()
    in_objects = mutation.file.startswith("bpf/")
    file.write_text(text.replace(mutation.old, mutation.new))
    try:
        yield builds(copy) if in_objects else True
    finally:
        file.write_text(text)
        if in_objects and not builds(copy):
            raise Refusal("the objects cannot be built without the change either")


def result_of(mutation: Mutation, copy: Path) -> Result:
    """Return the result of the change."""
    with applied(mutation, copy) as whole:
        if not whole:
            return "does not build"
        for test in mutation.tests:
            if not passes(copy, [test]):
                return "killed"
        return "survived"


def run(mutations: Sequence[Mutation], root: Path) -> dict[Mutation, Result]:
    """Test all changes. Raise Refusal if a change cannot be made, or if a test fails without it."""
    check(mutations, root)
    with scratch(root) as copy:
        print("the tests without a change:", end=" ", flush=True)
        for test in sorted({test for each in mutations for test in each.tests}):
            if not passes(copy, [test]):
                raise Refusal(f"{test} fails without a change:\n{(copy / 'output').read_text()}")
        print("they pass")
        results = {}
        for each in mutations:
            begun = time.monotonic()
            results[each] = result_of(each, copy)
            print(f"{results[each]} ({time.monotonic() - begun:.0f} s)  {each}", flush=True)
        return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("words", nargs="*", help="only changes that contain one of these words")
    parser.add_argument("--list", action="store_true", help="only list the changes")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = [
        each
        for each in MUTATIONS
        if not options.words or any(word in str(each) for word in options.words)
    ]
    try:
        if options.list:
            check(chosen, ROOT)
            print("\n".join(map(str, chosen)))
            return 0
        results = run(chosen, ROOT)
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return 2
    killed = sum(result == "killed" for result in results.values())
    print(f"{killed} of {len(results)} changes were found")
    return 0 if killed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
