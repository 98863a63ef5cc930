"""The driver of class ovn at a northbound database that three servers replicate over TLS, with a
real ovn-northd. The leader is killed while Services change: afterwards every Service has one row
with its pods, and no other row exists."""

import asyncio
import os
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.drivers.ovn.rows import intent
from tests.drivers.ovn.traffic import DEADLINE_S, run_pass, settle
from tests.net.ovsdb_servers import Cluster

from fairlead.drivers.ovn import northbound
from fairlead.drivers.ovn.driver import OvnDriver
from fairlead.drivers.ovn.spec import Site
from fairlead.lab import namespace, process
from fairlead.lab.ovn.central import Central
from fairlead.lab.ovn.programs import program, schema
from fairlead.model import LoadBalancer, ServiceKey
from fairlead.net.ovsdb import Database, Insert, Row, Table, Tls, new_uuid

ROUNDS = int(os.environ.get("FAIRLEAD_HISTORIES") or 2)
"""How often the leader is killed."""
KEYS = [ServiceKey("default", f"s{number}") for number in range(6)]
STEPS, KILLED_AT = 40, 15
TABLES = {
    northbound.BALANCERS: Table(("name", "vips", "external_ids")),
    "Logical_Router": Table(("name", "load_balancer")),
}


@pytest.fixture(scope="module")
def cluster(
    ovn_programs: None, ovsdb_programs: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Three servers of the northbound database."""
    directory = tmp_path_factory.mktemp("northbound")
    made = Cluster(directory, schema("ovn-nb.ovsschema"), northbound.NAME)
    try:
        made.start()
        yield made
    finally:
        made.end()


@pytest.fixture
async def southbound(cluster: Cluster) -> AsyncIterator[Central]:
    """The southbound database, and an ovn-northd that is connected to both."""
    name = f"ovr{os.getpid()}"
    inside = f"flt-{name}"
    directory = Path(tempfile.mkdtemp(prefix="flt-"))
    namespace.create(inside)
    central = Central(name, directory, inside)
    try:
        await central.start_database("sb", create=True)
        await central.control("sb", "init")
        process.spawn(
            name,
            "ovn/northd",
            (
                str(program("ovn-northd")),
                f"--ovnnb-db={','.join(cluster.remotes)}",
                f"--ovnsb-db={central.remote('sb')}",
                f"--ca-cert={cluster.tls.ca}",
                f"--certificate={cluster.tls.certificate}",
                f"--private-key={cluster.tls.key}",
                f"--unixctl={directory}/northd.ctl",
                "--no-chdir",
                "-vconsole:warn",
            ),
            log=directory / "northd.log",
        )
        yield central
    finally:
        await process.kill_all(process.find(name))
        namespace.delete(inside)
        shutil.rmtree(directory)


@asynccontextmanager
async def client(
    remotes: list[str], tls: Tls, *, leader_only: bool = False
) -> AsyncIterator[Database]:
    """Run a client of another program during the block."""
    database = Database(northbound.NAME, remotes, TABLES, tls=tls, leader_only=leader_only)
    task = asyncio.create_task(database.run())
    try:
        await database.wait_synced(DEADLINE_S)
        yield database
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def running(cluster: Cluster, router: str, **given: Any) -> AsyncIterator[OvnDriver]:
    """Run a driver during the block."""
    driver = OvnDriver(Site(router, router), cluster.remotes, tls=cluster.tls, **given)
    task = asyncio.create_task(driver.run())
    try:
        await driver.wait_synced(DEADLINE_S)
        yield driver
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def wanted_of(dice: random.Random, key: ServiceKey) -> LoadBalancer:
    """Return a Service with some pods."""
    number = KEYS.index(key)
    pods = sorted(dice.sample(range(10, 18), dice.randrange(1, 5)))
    backends = [f"10.244.{number}.{pod}" for pod in pods]
    return intent(backends, key=key, addresses=(f"203.0.113.{number + 40}",))


def backends_of(row: Row) -> set[str]:
    """Return the backends of a row that get new connections."""
    marks = row.map("external_ids")
    return set(row.map("vips")[marks["fairlead.io/vip"]].split(","))


@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_a_leader_that_is_killed_while_services_change_loses_and_doubles_no_row(
    cluster: Cluster, southbound: Central, seed: int
) -> None:
    dice, router = random.Random(seed), f"r{seed}"
    wanted: dict[ServiceKey, LoadBalancer] = {}
    async with client(cluster.remotes, cluster.tls, leader_only=True) as database:
        leader = database.server
        await database.transact([Insert("Logical_Router", {"name": router}, new_uuid())])
    try:
        remotes = [southbound.remote("sb")]
        async with running(cluster, router, southbound=remotes) as driver:
            for step in range(STEPS):
                key = dice.choice(KEYS)
                wanted[key] = wanted_of(dice, key)
                work = asyncio.create_task(run_pass(driver, *wanted.values(), keys=KEYS))
                if step == KILLED_AT:
                    await asyncio.sleep(dice.random() * 0.02)  # any point of a write
                    cluster.member(leader).kill()
                await work
            # This also waits until northd has processed every row.
            await settle(driver, *wanted.values(), keys=KEYS)
        async with client(cluster.remotes, cluster.tls) as database:
            own = {
                uuid: row
                for uuid, row in database.rows(northbound.BALANCERS).items()
                if row.map("external_ids").get("fairlead.io/cluster") == router
            }
            found = [(row.map("external_ids")["fairlead.io/service"], row) for row in own.values()]
            assert sorted(name for name, _ in found) == sorted(map(str, wanted))
            for name, row in found:
                (listener,) = wanted[ServiceKey.parse(name)].listeners
                assert backends_of(row) == {f"{pod.address}:8080" for pod in listener.pods}
            (attached,) = (
                row.strings("load_balancer")
                for row in database.rows("Logical_Router").values()
                if row.string("name") == router
            )
            assert attached == own.keys()
    finally:
        cluster.member(leader).start()
