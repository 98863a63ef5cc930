"""The doctor at API servers. Faults are injected one by one: it names each, and nothing else, and
after the remedy it names nothing. Remedies that are commands are executed as they are printed.
Healthy clusters have no finding, whatever they do. A caller without rights is told what was not
looked at."""

import asyncio
import base64
import itertools
import json
import os
import random
import secrets
import sys
import time
from collections.abc import AsyncIterator, Sequence, Set
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from msgspec import structs
from tests.doctor.world import (
    DEADLINE_S,
    OTHERWISE_WITHOUT_FAIRLEAD,
    TYPED,
    WITH_FAIRLEAD,
    WITHOUT_FAIRLEAD,
    Fault,
    World,
    delete_all,
    make_nodes,
    rights,
)
from tests.programs import SEED

from fairlead.doctor.examine import examine
from fairlead.doctor.finding import RootCause
from fairlead.doctor.gather import Request
from fairlead.doctor.pages import PAGES
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.objects import NODES, PODS, SERVICES
from fairlead.lab import crds, manifests
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.kubeapiserver import KubeApiServer
from fairlead.lab.settings import kubeconfig
from fairlead.model import ServiceKey

pytestmark = pytest.mark.asyncio(loop_scope="module")

GRACE_S = 1.0
"""Shorter than the time for which the Services of the healthy clusters exist."""
TENANT: Sequence[tuple[str, Sequence[str]]] = (
    ("", ["services", "pods", "events"]),
    ("discovery.k8s.io", ["endpointslices"]),
    ("apps", ["deployments", "statefulsets", "daemonsets"]),
    ("networking.k8s.io", ["networkpolicies"]),
)
"""The rights of a user of one namespace, as in docs/doctor.md."""


class Cluster(NamedTuple):
    server: KubeApiServer
    client: Client
    kubeconfig: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    real_programs: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """A real API server with Nodes, the CRDs of Fairlead, and the rights of its roles."""
    folder = tmp_path_factory.mktemp("doctor")
    async with (
        KubeApiServer(folder / "server", lab=f"doctor{os.getpid()}") as server,
        Client(server.access) as client,
    ):
        path = folder / "kubeconfig"
        path.write_text(kubeconfig("doctor", server.access))
        await crds.install(client)
        await make_nodes(client)
        await manifests.apply(client, rights())
        yield Cluster(server, client, path)


@pytest_asyncio.fixture(loop_scope="module")
async def world(cluster: Cluster) -> AsyncIterator[World]:
    async with world_of(cluster) as world:
        yield world


@asynccontextmanager
async def world_of(cluster: Cluster) -> AsyncIterator[World]:
    """A namespace of its own, in which everything works."""
    world = World(
        cluster.client, cluster.kubeconfig, f"world-{secrets.token_hex(4)}", fairlead=True
    )
    await world.build()
    try:
        yield world
    finally:
        await world.end()
        await delete_all(world)
        await manifests.apply(cluster.client, rights())


async def test_every_finding_is_injected_except_those_of_other_controllers() -> None:
    injected = {each.code for each in WITH_FAIRLEAD}
    assert PAGES.keys() - injected == {"AddressPending", "ChangeFailed", "ConditionFalse"}


@pytest.mark.parametrize("fault", WITH_FAIRLEAD, ids=lambda each: each.code)
async def test_a_fault_is_named_until_its_remedy_is_carried_out(fault: Fault, world: World) -> None:
    await fault.play(world)


@pytest_asyncio.fixture(loop_scope="module")
async def other_cluster(tmp_path: Path) -> AsyncIterator[World]:
    """A cluster without Fairlead, whose balancer writes nothing but addresses."""
    cidrs = ("10.96.0.0/16", "2001:db8:96::/112")
    async with (
        ApiServer(service_cidrs=cidrs) as server,
        Client(Access(server.url)) as client,
    ):
        path = tmp_path / "kubeconfig"
        path.write_text(kubeconfig("doctor", Access(server.url)))
        await make_nodes(client)
        world = World(client, path, "shop", fairlead=False)
        await world.build()
        yield world
        await world.end()


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            each,
            id=each.code,
            marks=() if each.code in OTHERWISE_WITHOUT_FAIRLEAD else pytest.mark.soak,
        )
        for each in WITHOUT_FAIRLEAD
    ],
)
async def test_without_fairlead_a_fault_is_named_until_its_remedy_is_carried_out(
    fault: Fault, other_cluster: World
) -> None:
    await fault.play(other_cluster)


async def test_a_cluster_that_works_has_no_finding_whatever_it_does(world: World) -> None:
    async def nothing_is_wrong() -> None:
        assert (await world.report_of(grace_s=GRACE_S)).findings == ()

    await asyncio.sleep(2 * GRACE_S)
    await nothing_is_wrong()
    await world.pod("new1", "n3", starts=True)  # a rollout
    await nothing_is_wrong()
    await world.report("new1", ready=True)
    await world.client.delete(PODS, (world.namespace, "w1"))
    await nothing_is_wrong()
    await world.remove("w1")
    await nothing_is_wrong()
    await world.client.patch(NODES, ("", "n2"), {"spec": {"unschedulable": True}})  # a drain
    await nothing_is_wrong()
    await world.client.delete(PODS, (world.namespace, "w2"))
    await world.pod("new2", "n1", starts=True)
    await nothing_is_wrong()
    await world.report("new2", ready=True)
    await world.remove("w2")
    await world.client.patch(NODES, ("", "n2"), {"spec": {"unschedulable": None}})
    await nothing_is_wrong()
    for number in (3, 4, 5):  # scaling
        await world.pod(f"new{number}", "n2", starts=True)
    await nothing_is_wrong()
    await world.remove("new3", "new4", "new5")
    await world.client.delete(SERVICES, (world.namespace, "web"))
    await nothing_is_wrong()


async def tenant_of(cluster: Cluster, world: World, folder: Path) -> Path:
    """Return the kubeconfig of a user who may read one namespace."""
    rules = [
        {"apiGroups": [group], "resources": resources, "verbs": ["list", "watch"]}
        for group, resources in TENANT
    ]
    metadata = {"name": "tenant", "namespace": world.namespace}
    group = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount"} | metadata
    await manifests.apply(
        cluster.client,
        [
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
            {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
            {
                "apiVersion": f"{group}/v1",
                "kind": "RoleBinding",
                "metadata": metadata,
                "roleRef": {"apiGroup": group, "kind": "Role", "name": "tenant"},
                "subjects": [subject],
            },
        ],
    )
    token = await cluster.server.service_account_token(f"{world.namespace}/tenant")
    path = folder / "tenant"
    path.write_text(kubeconfig("tenant", structs.replace(cluster.server.access, token=token)))
    return path


async def kubectl_doctor(path: Path, *options: str) -> tuple[int | None, str, str]:
    """Run the command as a plugin of kubectl. Return its exit status, its output, its errors."""
    short = "--grace", "0", "--observe", "0.1"
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *("kubectl", "fairlead", "doctor", *short, *options),
        stdout=pipe,
        stderr=pipe,
        env={
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "HOME": str(path.parent),
            "KUBECONFIG": str(path),
        },
    )
    async with asyncio.timeout(DEADLINE_S):
        output, errors = await child.communicate()
    assert b"Traceback" not in errors
    return child.returncode, output.decode(), errors.decode()


async def test_a_tenant_is_told_what_was_not_looked_at(
    cluster: Cluster, world: World, tmp_path: Path
) -> None:
    path = await tenant_of(cluster, world, tmp_path)
    await world.slices()
    own, everywhere = await asyncio.gather(
        kubectl_doctor(path, "-n", world.namespace), kubectl_doctor(path, "-A")
    )
    status, output, _ = own
    assert status == 0
    assert "1 Service looked at" in output
    (forbidden,) = [
        " ".join(line.split())
        for line in output.replace("\n  ", " ").splitlines()
        if line.endswith("(forbidden)")
    ]
    for source in ("services of other namespaces", "nodes", "addresspools", "rights of Fairlead"):
        assert source in forbidden
    assert "healthy" not in output
    status, output, errors = everywhere
    assert (status, output) == (2, "")
    assert "is forbidden" in errors
    assert "look at one namespace, with -n NAMESPACE" in errors
    await TYPED(world)
    status, output, _ = await kubectl_doctor(path, f"{world.namespace}/web")
    assert (status, "SelectorMatchesNothing" in output) == (1, True)


def expired(token: str, key: Path) -> str:
    """Return the token of a ServiceAccount as the API server signed it, except that it was valid
    until an hour ago."""

    def encoded(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    header, payload, _ = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    for name in ("iat", "nbf", "exp"):
        claims[name] -= 86400 + 3600
    signed = f"{header}.{encoded(json.dumps(claims).encode())}"
    signing = serialization.load_pem_private_key(key.read_bytes(), None)
    assert isinstance(signing, ec.EllipticCurvePrivateKey)
    numbers = decode_dss_signature(signing.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
    return f"{signed}.{encoded(b''.join(each.to_bytes(32) for each in numbers))}"


async def test_tokens_that_have_expired_or_were_revoked_are_not_healthy(
    cluster: Cluster, world: World, tmp_path: Path
) -> None:
    revoked = await tenant_of(cluster, world, tmp_path)
    token = await cluster.server.service_account_token(f"{world.namespace}/tenant")
    old = expired(token, cluster.server.directory / "accounts.key")
    late = tmp_path / "expired"
    late.write_text(kubeconfig("tenant", structs.replace(cluster.server.access, token=old)))

    async def is_refused(path: Path) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                status, output, errors = await kubectl_doctor(path, "-n", world.namespace)
                if status == 2:
                    break
        assert output == ""
        assert "renew the credentials" in errors

    await is_refused(late)
    await world.kubectl("delete serviceaccount tenant")
    await is_refused(revoked)


PAIRS = 40
OF_PROCESSES = ("FinalizerOrphaned", "GatewaysDiffer", "GatewayStale")
"""Faults that change the Leases of their namespace."""
NEED_A_CONTROLLER = ("ClassUnserved", "AddressElsewhere", "PoolExhausted")
"""Faults that are not named if no controller of Fairlead is alive: then that is the cause."""
OF_PODS = ("SelectorMatchesNothing", "TargetPortNameUnknown", "PodsNotReady", "AllTerminating")
BESIDE = ("SourceRangeForgetsPods", "AddressExcluded", "ApiForbidden", "GatewaysDiffer")
"""Faults of one Service that are independent of faults of its pods."""
BY_CODE = {each.code: each for each in WITH_FAIRLEAD}


def random_pairs(count: int) -> list[tuple[Fault, Fault]]:
    """Return pairs of different faults that are independent; the first may be one of processes."""
    chosen = random.Random(SEED or "pairs")
    pairs: list[tuple[Fault, Fault]] = []
    while len(pairs) < count:
        first, second = chosen.sample(WITH_FAIRLEAD, 2)
        codes = first.code, second.code
        if codes[1] in OF_PROCESSES or (
            codes[0] == "FinalizerOrphaned" and codes[1] in NEED_A_CONTROLLER
        ):
            continue
        pairs.append((first, second))
    return pairs


@pytest.mark.soak
@pytest.mark.parametrize(("first", "second"), random_pairs(PAIRS), ids=lambda each: each.code)
async def test_two_faults_of_two_services_are_both_named(
    first: Fault, second: Fault, cluster: Cluster
) -> None:
    async with world_of(cluster) as one, world_of(cluster) as other:
        await first.make(one)
        await second.make(other)
        keys = {
            (first.code, first.subject.format(one.namespace)),
            (second.code, second.subject.format(other.namespace)),
        }
        found = await found_in(one, other, keys)
        assert {each.key for each in found} == keys


async def found_in(one: World, other: World, keys: Set[tuple[str, str]]) -> tuple[RootCause, ...]:
    """Return the findings about both namespaces once they are those, or the last ones."""
    services = tuple(ServiceKey(each.namespace, "web") for each in (one, other))
    request = Request(services, "", one.config, grace_s=0, observe_s=0.5)
    for _ in range(5):
        await one.slices()
        await other.slices()
        found = (await examine(one.client, request)).findings
        if {each.key for each in found} == keys:
            break
    return found


@pytest.mark.soak
@pytest.mark.parametrize(("beside", "of_pods"), list(itertools.product(BESIDE, OF_PODS)))
async def test_two_faults_of_one_service_are_both_named(
    beside: str, of_pods: str, world: World
) -> None:
    faults = BY_CODE[beside], BY_CODE[of_pods]
    for each in faults:
        await each.make(world)
    keys = {(each.code, each.subject.format(world.namespace)) for each in faults}
    for _ in range(5):
        found = (await world.report_of()).findings
        if {each.key for each in found} == keys:
            break
    assert {each.key for each in found} == keys


@pytest.mark.soak
async def test_200_services_are_looked_at_within_15_s_and_one_within_5_s(world: World) -> None:
    for number in range(200):
        await world.service(f"s{number}")
        await world.serve(f"203.0.113.{number + 10}", name=f"s{number}")
    await world.slices()
    for services, limit_s in (((), 15), ((ServiceKey(world.namespace, "web"),), 5)):
        for fault, wanted in ((None, 0), (TYPED, 1)):
            if fault is not None:
                await fault(world)
            begun_s = time.monotonic()
            request = Request(services, world.namespace, world.config, grace_s=0)
            report = await examine(world.client, request)
            took_s = time.monotonic() - begun_s
            print(f"{len(report.services)} Services, {wanted} findings: {took_s:.1f} s")
            assert len(report.findings) == wanted
            assert took_s < limit_s
        await world.kubectl(
            'patch service web --type=merge -p \'{"spec":{"selector":{"app":"web"}}}\''
        )
