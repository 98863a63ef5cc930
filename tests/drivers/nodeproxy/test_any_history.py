"""After any history of Services, endpoints, the driver and its table, the kernel contains what is
planned, and packets agree with the rules.

The test runs random histories on a real kernel: Services and endpoints are created, changed and
deleted; the serving process is killed, also during writes, and restarted; other programs flush the
ruleset, and delete or add elements. After each step the elements in the table are those that the
plan renders, except for frontends that another Service gets. The chains and rules are always the
same, and the results of packets of new and existing flows are those of Kubernetes' rules.
FAIRLEAD_SEED selects other histories, FAIRLEAD_HISTORIES their number."""

import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import hypothesis
import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.drivers.nodeproxy.conftest import (
    NODE4,
    NODE6,
    POD_CIDRS,
    SERVICE_CIDRS,
    SILENT,
    Seen,
    Site,
    callers,
    request,
    request_by_sctp,
)
from tests.drivers.nodeproxy.drawn import (
    SERVICES,
    SLOTS,
    Call,
    DrawnService,
    calls,
    expected,
    owners,
    serving,
)
from tests.drivers.nodeproxy.process import NODE, Settings, make_state, show

from fairlead.drivers.nodeproxy.elements import Spec, frontend_of, parsed
from fairlead.drivers.nodeproxy.skeleton import owned_sets
from fairlead.errors import Conflict
from fairlead.lab import namespace
from fairlead.model import NodeService, ServiceKey
from fairlead.net.nftables import Nftables
from fairlead.plan.cluster import plan_node

pytestmark = [pytest.mark.root, pytest.mark.soak]

SEED = int(os.environ.get("FAIRLEAD_SEED") or 7)
HISTORIES = int(os.environ.get("FAIRLEAD_HISTORIES") or 2)
STEPS = 16
CALLS = 16
KEPT = 6
DEADLINE_S = 60.0
SILENCE_S = 0.2
SETTINGS = Settings((NODE4, NODE6), POD_CIDRS, SERVICE_CIDRS)
DISTURBANCES = (
    "flush ruleset",
    "delete table inet fairlead",
    "flush table inet fairlead",
    "flush chain inet fairlead prerouting",
    "flush map inet fairlead services4",
    "flush map inet fairlead masquerade6",
    "flush set inet fairlead cluster_ips4",
    "flush set inet fairlead flows4",
    "add element inet fairlead services4 { 172.30.0.99 . 6 . 80 : drop }",
    "insert rule inet fairlead output drop",
)


class ContinuedFlow(NamedTuple):
    """A flow that continues from the same source port."""

    call: Call
    port: int


AFFINITY_NUMBER = re.compile(r"^(jump recall[46]_|goto remember[46]_\d+_)(\d+)$")
"""Matches the number of a Service's map of clients, which depends on the history of the node."""


def without_numbers(table: Mapping[ServiceKey, Spec]) -> Mapping[ServiceKey, Spec]:
    return {
        key: frozenset(each._replace(value=AFFINITY_NUMBER.sub(r"\1", each.value)) for each in spec)
        for key, spec in table.items()
    }


def equal_except_numbers(
    found: Mapping[ServiceKey, Spec] | str, wanted: Mapping[ServiceKey, Spec]
) -> bool:
    """Return whether the table has the wanted elements, and each Service with affinity has its own
    map of clients."""
    if isinstance(found, str):
        return False
    return without_numbers(found) == without_numbers(wanted) and numbers_are_unique(found)


def numbers_are_unique(table: Mapping[ServiceKey, Spec]) -> bool:
    numbers = [
        {found[2] for each in spec if (found := AFFINITY_NUMBER.match(each.value))}
        for spec in table.values()
    ]
    return all(len(each) <= 1 for each in numbers) and sum(map(len, numbers)) == len(
        set().union(*numbers)
    )


class History(RuleBasedStateMachine):
    """The history of one node, whose namespace this process is in. The test sets `site`."""

    site: Site

    def __init__(self) -> None:
        super().__init__()
        self.shown: dict[int, DrawnService] = {}
        self.choose = random.Random(SEED)
        self.seen: dict[str, str] = {}
        """The rules of each chain when the test first read them."""
        self.kept: list[ContinuedFlow] = []
        self.theirs = False
        self.threads = ThreadPoolExecutor(CALLS)
        self.nft = Nftables()
        self.sctp = threading.Lock()  # the kernel reports SCTP errors to all sockets
        self._start()

    def teardown(self) -> None:
        self._kill()
        self.threads.shutdown()
        self.nft.run("flush ruleset")
        self.nft.close()

    @initialize(some=st.lists(SERVICES, min_size=2, max_size=4))
    def begin(self, some: list[DrawnService]) -> None:
        self.show(some)

    @rule(some=st.lists(SERVICES, min_size=1, max_size=3))
    def show(self, some: list[DrawnService]) -> None:
        """Create Services, or replace existing ones."""
        for drawn in some:
            self._show(drawn)

    @precondition(lambda self: self.shown)
    @rule(slot=st.integers(0, SLOTS - 1), other=SERVICES)
    def move(self, slot: int, other: DrawnService) -> None:
        """Change the endpoints of a Service."""
        self._show(self._one(slot)._replace(endpoints=other.endpoints))

    @precondition(lambda self: self.shown)
    @rule(slot=st.integers(0, SLOTS - 1))
    def remove(self, slot: int) -> None:
        gone = self.shown.pop(self._one(slot).slot)
        self._tell({"services": {gone.name: None}, "slices": dict.fromkeys(gone.slices())})

    @rule(first=SERVICES, second=SERVICES, pause_s=st.sampled_from((0.0, 0.005, 0.02)))
    def kill(self, first: DrawnService, second: DrawnService, pause_s: float) -> None:
        """Kill the process while it handles one change. Another change comes before its restart."""
        self._show(first)
        time.sleep(pause_s)
        self._kill()
        self.shown[second.slot] = second
        self._start()

    @precondition(lambda self: self.shown)
    @rule(what=st.sampled_from(DISTURBANCES), slot=st.integers(0, SLOTS - 1), other=SERVICES)
    def disturb(self, what: str, slot: int, other: DrawnService) -> None:
        """Disturb the table while a Service changes."""
        with suppress(Conflict):  # the table may not exist yet
            self.nft.run(what)
        self.nft.run("add table inet theirs; add chain inet theirs c")
        self.theirs = True
        self.move(slot, other)
        if what.startswith("flush map"):
            # A flow that begins while a map is empty, but the rules are present, may remain without
            # its masquerading.
            self.the_table_is_as_planned()

    @invariant()
    def the_table_is_as_planned(self) -> None:
        state = make_state()
        show(state, self._everything())
        planned = plan_node(state, NODE, list(state.services))
        intents = {
            key: intent for key, intent in planned.items() if isinstance(intent, NodeService)
        }
        having = owners(self.shown.values())
        elsewhere = {
            drawn.name: {key for key, (slot, _) in having.items() if slot != drawn.slot}
            for drawn in self.shown.values()
        }
        wanted = {
            key: frozenset(
                element for element in spec if frontend_of(element.key) not in elsewhere[key.name]
            )
            for key, spec in SETTINGS.driver(state).render(intents).items()
        }
        end_s = time.monotonic() + DEADLINE_S
        while not equal_except_numbers(found := self._table(), wanted):
            assert time.monotonic() < end_s, f"wanted {wanted}\nfound {found}"
            assert self.process.poll() is None, "the process has ended by itself"
            time.sleep(0.02)
        if self.theirs:
            assert any("chain" in record for record in self.nft.listing("list table inet theirs"))

    @invariant()
    def packets_agree(self) -> None:
        having = owners(self.shown.values())
        everything = [
            call for drawn in self.shown.values() for call in calls(drawn) if _has(having, call)
        ]
        fresh = [
            ContinuedFlow(call, 0)
            for call in self.choose.sample(everything, min(CALLS, len(everything)))
        ]
        self._keep(
            [call for call in everything if call.protocol != "TCP" and expected(call).answers]
        )
        left = [*fresh, *(now for kept in self.kept if (now := self._now(kept)))]
        end_s = time.monotonic() + DEADLINE_S
        # A recorded client may reach a wrong endpoint until its record is deleted, shortly after
        # the table is correct.
        while left:
            heard = self.threads.map(self._call, left)
            said = [
                (one, problem)
                for one, answers in zip(left, heard, strict=True)
                if (problem := _wrong(one, answers))
            ]
            left = [one for one, _ in said]
            assert not left or time.monotonic() < end_s, "\n".join(
                f"{one}: {problem}" for one, problem in said
            )

    def _one(self, number: int) -> DrawnService:
        return self.shown[sorted(self.shown)[number % len(self.shown)]]

    def _show(self, drawn: DrawnService) -> None:
        self.shown[drawn.slot] = drawn
        self._tell({"services": {drawn.name: drawn.service()}, "slices": drawn.slices()})

    def _tell(self, changed: Mapping[str, Any] | Settings) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(changed) + b"\n")
        self.process.stdin.flush()

    def _everything(self) -> dict[str, dict[str, Any]]:
        services = {drawn.name: drawn.service() for drawn in self.shown.values()}
        slices = {
            name: each for drawn in self.shown.values() for name, each in drawn.slices().items()
        }
        return {"services": services, "slices": slices}

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.drivers.nodeproxy.process"], stdin=subprocess.PIPE
        )
        self._tell(SETTINGS)
        self._tell(self._everything())

    def _kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def _table(self) -> Mapping[ServiceKey, Spec] | str:
        """Return the elements of the table by Service, or a description of an error in its
        rules."""
        try:
            records: Any = self.nft.listing("list table inet fairlead")
        except Conflict:
            return "there is no table"
        rules: dict[str, str] = {each["chain"]["name"]: "" for each in records if "chain" in each}
        for each in records:
            if "rule" in each:
                rules[each["rule"]["chain"]] += msgspec.json.encode(each["rule"]["expr"]).decode()
        for chain, text in self.seen.items():
            # Chains that are created on demand may be missing.
            if rules.get(chain, text if chain.rpartition("_")[2].isdecimal() else "") != text:
                return f"chain {chain} has {rules.get(chain)} instead of {text}"
        self.seen = rules | self.seen
        wanted = set(owned_sets(rules))
        return parsed(
            [
                each
                for each in records
                if (each.get("map") or each.get("set") or {}).get("name") in wanted
            ]
        )

    def _keep(self, some: Sequence[Call]) -> None:
        """Sometimes continue one of these calls as a flow, instead of the oldest one if there are
        KEPT flows."""
        if some and self.choose.random() < 0.7:
            one = self.choose.choice(some)
            if one not in [kept.call for kept in self.kept]:
                self.kept = [*self.kept, ContinuedFlow(one, 10_000 + self.choose.randrange(9000))][
                    -KEPT:
                ]

    def _now(self, kept: ContinuedFlow) -> ContinuedFlow | None:
        """Return the same flow with the present state of the Service; None if the Service no longer
        has the frontend."""
        before, drawn = kept.call, self.shown.get(kept.call.drawn.slot)
        port = before.drawn.ports[before.number]
        if (
            drawn is None
            or port not in drawn.ports
            or before.family not in drawn.families
            or before.kind not in drawn.kinds()
        ):
            return None
        now = before._replace(drawn=drawn, number=drawn.ports.index(port))
        return (
            ContinuedFlow(now, kept.port)
            if now.target == before.target and _has(owners(self.shown.values()), now)
            else None
        )

    def _call(self, one: ContinuedFlow) -> list[Seen | str]:
        timeout_s = SILENCE_S if expected(one.call).otherwise == SILENT else 2.0
        return [
            self._answer(one, timeout_s)
            for _ in range(2 if one.call.drawn.service_with_affinity else 1)
        ]

    def _answer(self, one: ContinuedFlow, timeout_s: float) -> Seen | str:
        call, six = one.call, one.call.family == "IPv6"
        source = callers(call.family)(call.place) if call.place in ("client", "blocked") else ""
        family = socket.AF_INET6 if six else socket.AF_INET
        try:
            if call.protocol == "SCTP":
                with self.sctp, self.site.sctp_socket(call.place, family) as sock:
                    return request_by_sctp(
                        sock, *call.target, source=source, source_port=one.port, timeout_s=timeout_s
                    )
            kind = socket.SOCK_STREAM if call.protocol == "TCP" else socket.SOCK_DGRAM
            with namespace.make_socket(self.site.name(call.place), family, kind) as sock:
                if source or one.port:
                    sock.bind((source, one.port))
                return request(sock, *call.target, timeout_s=timeout_s)
        except OSError as error:
            return str(error)


def _has(having: Mapping[str, tuple[int, str]], call: Call) -> bool:
    """Return whether the called Service has the frontend, with this type of address."""
    return having[call.frontend] == (call.drawn.slot, call.kind)


def _wrong(one: ContinuedFlow, answers: Sequence[Seen | str]) -> str:
    """Return a description of an error in these answers; an empty text if there is none."""
    rules = expected(one.call)
    for answer in answers:
        if one.port:
            # A flow stays with a serving endpoint, also after changes of policies. If there is no
            # serving endpoint, the flow is unchanged.
            astray = rules.answers and (
                not isinstance(answer, Seen) or answer.pod not in serving(one.call.drawn)
            )
        elif isinstance(answer, Seen):
            astray = answer not in rules.answers
        else:
            astray = bool(rules.answers) or answer != rules.otherwise
        if astray:
            return f"{answer}, expected {rules}"
    pods = {answer.pod for answer in answers if isinstance(answer, Seen)}
    return f"affinity, but {sorted(pods)} answered" if len(pods) > 1 else ""


def test_after_any_history_the_table_is_as_planned_and_packets_agree(
    site: Site, at_node: None
) -> None:
    class OfThisSite(History):
        pass

    OfThisSite.site = site
    hypothesis.seed(SEED)(OfThisSite)
    phases = (Phase.generate,) if HISTORIES < 100 else (Phase.generate, Phase.shrink)
    run_state_machine_as_test(
        OfThisSite,
        settings=settings(
            max_examples=HISTORIES, stateful_step_count=STEPS, database=None, phases=phases
        ),
    )
