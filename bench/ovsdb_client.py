"""One measurement of Fairlead's client, for `bench.ovsdb`.

`python -m bench.ovsdb_client REMOTE`. Out: one line of JSON."""

import asyncio
import json
import resource
import statistics
import sys
import time

from fairlead.net.ovsdb import Database, Table, Update, Wait, by_uuid

CHANGES = 100
COLUMNS = ("name", "protocol", "vips", "options", "external_ids")


def resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def measure(remote: str) -> dict[str, float]:
    before_mib, wall_s, cpu_s = resident_mib(), time.monotonic(), time.process_time()
    mark = (("external_ids", "includes", {"fairlead.io/cluster": "cluster"}),)
    database = Database("OVN_Northbound", [remote], {"Load_Balancer": Table(COLUMNS, mark)})
    running = asyncio.create_task(database.run())
    await database.wait_synced(600)
    figures = {
        "rows": len(database.rows("Load_Balancer")),
        "read_s": time.monotonic() - wall_s,
        "read_cpu_s": time.process_time() - cpu_s,
        "memory_mib": resident_mib() - before_mib,
    }
    row = next(iter(database.rows("Load_Balancer").values()))
    (vip,) = row.map("vips")
    took_s = []
    cpu_s = time.process_time()
    for number in range(CHANGES):
        begun_s = time.monotonic()
        old, new = database.rows("Load_Balancer")[row.uuid].map("vips"), {vip: f"10.0.0.1:{number}"}
        await database.transact(
            [
                Wait("Load_Balancer", by_uuid(row.uuid), ({"vips": old},)),
                Update("Load_Balancer", by_uuid(row.uuid), {"vips": new}),
            ],
            timeout_s=60,
        )
        assert database.rows("Load_Balancer")[row.uuid].map("vips") == new
        took_s.append(time.monotonic() - begun_s)
    figures["change_ms"] = 1000 * statistics.median(took_s)
    figures["change_cpu_ms"] = 1000 * (time.process_time() - cpu_s) / CHANGES
    running.cancel()
    return figures


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(sys.argv[1]))))
