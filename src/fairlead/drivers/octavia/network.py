"""The objects at Neutron that belong to load balancers: read together with them, and changed in the
same sequence of writes.

In: BalancerStates. Out: what was Found for each Service, with its floating IPs and the rules by
which its nodes are reached. If no feature needs Neutron, Neutron is not called."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from fairlead.drivers.octavia import attach, security_group
from fairlead.drivers.octavia.answers import get_versions
from fairlead.drivers.octavia.apply import PollSchedule, carry_out
from fairlead.drivers.octavia.balancers import (
    BalancerState,
    FloatingIp,
    Found,
    FoundRule,
    provider_of,
)
from fairlead.drivers.octavia.changes import (
    AddRules,
    AttachFloatingIp,
    Call,
    DeleteRules,
    RemoveSecurityGroup,
    Write,
)
from fairlead.drivers.octavia.cloud import Cloud
from fairlead.drivers.octavia.marks import Owner
from fairlead.drivers.octavia.neutron import all_floating, floating_of
from fairlead.errors import FairleadError
from fairlead.kube.events import Recorder
from fairlead.model import ServiceKey

States = Mapping[ServiceKey, Sequence[BalancerState]]


RANGES = "SourceRangesNotHeld"
COVERING = (2, 27)
"""The version of Octavia's API since May 2023. Since December 2022 the monitors of provider ovn
also cover floating IPs that are attached later. A cloud takes both from the same OpenStack release,
so this version of the API shows that its monitors do so."""


class Network:
    """The objects at Neutron of one cloud. `manage_floating_ips`, `manage_security_group`: whether
    floating IPs, or the security group of the nodes, are managed."""

    def __init__(
        self,
        cloud: Cloud,
        owner: Owner,
        recorder: Recorder,
        *,
        manage_floating_ips: bool,
        manage_security_group: bool,
    ) -> None:
        self._cloud = cloud
        self._owner = owner
        self._recorder = recorder
        self._manage_floating_ips = manage_floating_ips
        self._manage_security_group = manage_security_group
        self._secured: frozenset[str] = frozenset()
        self._processed: frozenset[str] = frozenset()
        """Node addresses whose ports have been processed since the last read, including addresses
        without a port in this project."""
        self._covers: bool | None = None
        self._opened: frozenset[str] = frozenset()
        """Node addresses that got the group since the last read of everything."""
        self._unused: frozenset[str] = frozenset()
        self._idle: frozenset[str] = frozenset()
        self._idle_reported_with: ServiceKey | None = None
        self._group = asyncio.Lock()
        """Held while the group, or a port that has it, is written."""

    @property
    def covers(self) -> bool:
        """True if monitors that provider ovn creates are known to cover floating IPs that are
        attached later."""
        return bool(self._covers)

    async def with_all(self, balancers: States) -> dict[ServiceKey, Found]:
        """Read everything of this cluster."""
        await self._read_api_version()
        own = await all_floating(self._cloud, self._owner) if self._manage_floating_ips else []
        rules: Mapping[ServiceKey, Sequence[FoundRule]] = {}
        if self._manage_security_group:
            async with self._group:
                rules = await security_group.all_rules(self._cloud, self._owner)
                self._note_ports(
                    balancers, await security_group.secured_ports(self._cloud, self._owner)
                )
            balancers = await self._with_sources(balancers)
        return self._found(balancers, own, rules)

    async def with_one(self, key: ServiceKey, balancers: Sequence[BalancerState]) -> Found | None:
        """Read everything of one Service; None if it has no objects."""
        await self._read_api_version()
        ports = {balancer.port_id for balancer in balancers} - {""}
        own = (
            await floating_of(self._cloud, self._owner, key, ports)
            if self._manage_floating_ips
            else []
        )
        whole: States = {key: balancers} if balancers else {}
        rules: Mapping[ServiceKey, Sequence[FoundRule]] = {}
        if self._manage_security_group:
            rules = await security_group.rules_of(self._cloud, self._owner, key)
            whole = await self._with_sources(whole)
        return self._found(whole, own, rules).get(key)

    async def carry_out(
        self, steps: Sequence[Write], schedule: PollSchedule, fence: Callable[[], None]
    ) -> None:
        """Make the writes in order. Raise the errors of `apply.carry_out`."""
        calls: list[Call] = []
        for step in steps:
            if isinstance(step, Call):
                calls.append(step)
                continue
            await carry_out(self._cloud, calls, schedule, fence)
            calls = []
            fence()
            match step:
                case AttachFloatingIp():
                    await attach.attach(self._cloud, self._owner, step)
                case AddRules():
                    async with self._group:
                        why_no_effect = await security_group.add_rules(
                            self._cloud, self._owner, step
                        )
                        self._processed |= {*step.nodes}
                        self._opened |= {*step.nodes}
                        self._idle -= {*step.nodes}
                    if why_no_effect:
                        message = f"source ranges have no effect: {why_no_effect} to its node ports"
                        self._recorder.event(step.service, step.uid, "Warning", RANGES, message)
                case DeleteRules():
                    async with self._group:
                        # After an error the group or its ports may have been changed as well.
                        group_deleted = True
                        try:
                            group_deleted = await security_group.delete_rules(
                                self._cloud, self._owner, step
                            )
                        finally:
                            if group_deleted:
                                self._secured = self._processed = frozenset()
                case RemoveSecurityGroup():
                    async with self._group:
                        nodes = self._idle & {*step.nodes}
                        await security_group.remove_group(self._cloud, self._owner, nodes)
                        self._secured, self._processed, self._idle = (
                            self._secured - nodes,
                            self._processed - nodes,
                            frozenset(),
                        )
        await carry_out(self._cloud, calls, schedule, fence)

    def _note_ports(self, balancers: States, ports: Sequence[frozenset[str]]) -> None:
        """Store which addresses have the group, and which of them were members neither at this read
        nor at the previous one."""
        needed = {
            one.member.address
            for own in balancers.values()
            for balancer in own
            for pool in balancer.pools
            for one in pool.members
        }
        idle = {
            address for port in ports if port.isdisjoint(needed | self._opened) for address in port
        }
        self._secured = frozenset(address for port in ports for address in port)
        self._idle = frozenset(idle & self._unused)
        self._unused = frozenset(idle)
        self._opened = frozenset()
        self._idle_reported_with = min(balancers, default=None)

    async def _read_api_version(self) -> None:
        """Read the API version, unless it is known. A failure is ignored, because only provider ovn
        needs the version, and other load balancers must not wait for it."""
        if self._manage_floating_ips and self._covers is None:
            with suppress(FairleadError):
                self._covers = (await get_versions(self._cloud)).newest >= COVERING

    async def _with_sources(self, balancers: States) -> States:
        whole = [balancer for own in balancers.values() for balancer in own]
        known: dict[tuple[str, str], tuple[str, ...]] = {}
        for provider in ("amphora", "ovn"):
            subnet_ids = {
                id_
                for balancer in whole
                if provider_of(balancer.provider) == provider
                for id_ in _subnets(balancer)
            }
            for id_, sources in (
                await security_group.sources_of(self._cloud, subnet_ids, provider)
            ).items():
                known[provider, id_] = sources

        def with_sources(balancer: BalancerState) -> BalancerState:
            provider = provider_of(balancer.provider) or ""
            sources = {
                source for id_ in _subnets(balancer) for source in known.get((provider, id_), ())
            }
            return msgspec.structs.replace(balancer, sources=tuple(sorted(sources)))

        return {key: list(map(with_sources, own)) for key, own in balancers.items()}

    def _found(
        self,
        balancers: States,
        all_: Sequence[FloatingIp],
        rules: Mapping[ServiceKey, Sequence[FoundRule]],
    ) -> dict[ServiceKey, Found]:
        by_port: dict[str, list[FloatingIp]] = defaultdict(list)
        unattached: dict[ServiceKey, list[FloatingIp]] = defaultdict(list)
        for one in all_:
            if one.port_id:
                by_port[one.port_id].append(one)
            elif one.service is not None:
                unattached[one.service].append(one)
        secured = (self._secured | self._processed) - self._idle
        return {
            key: Found(
                tuple(
                    msgspec.structs.replace(balancer, floating=tuple(by_port[balancer.port_id]))
                    for balancer in balancers.get(key, ())
                ),
                unattached_ips=tuple(unattached[key]),
                rules=tuple(sorted(rules.get(key, ()))),
                secured_addresses=secured,
                idle=tuple(sorted(self._idle)) if key == self._idle_reported_with else (),
            )
            for key in balancers.keys() | unattached.keys() | rules.keys()
        }


def _subnets(balancer: BalancerState) -> set[str]:
    return {
        balancer.subnet_id,
        *(id_ for _, id_ in balancer.further),
        *(one.member.subnet_id for pool in balancer.pools for one in pool.members),
    } - {""}
