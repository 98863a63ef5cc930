"""One measurement of ovsdbapp over the Python package `ovs`, for `bench.ovsdb`.

`python ovsdb_peer.py REMOTE`, with the interpreter of the tests' OpenStack. Out: one line of
JSON."""

import json
import resource
import statistics
import sys
import time

from ovs.db import idl
from ovsdbapp.backend.ovs_idl import connection, idlutils
from ovsdbapp.schema.ovn_northbound import impl_idl

CHANGES = 100
COLUMNS = ["name", "protocol", "vips", "options", "external_ids"]


def resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(remote: str) -> dict[str, float]:
    before_mib, wall_s, cpu_s = resident_mib(), time.monotonic(), time.process_time()
    helper = idl.SchemaHelper(schema_json=_schema(remote))
    helper.register_columns("Load_Balancer", COLUMNS)
    client = connection.OvsdbIdl(remote, helper)
    client.cond_change(
        "Load_Balancer",
        [["external_ids", "includes", ["map", [["fairlead.io/cluster", "cluster"]]]]],
    )
    api = impl_idl.OvnNbApiIdlImpl(connection.Connection(client, timeout=600))
    figures = {
        "rows": len(api.tables["Load_Balancer"].rows),
        "read_s": time.monotonic() - wall_s,
        "read_cpu_s": time.process_time() - cpu_s,
        "memory_mib": resident_mib() - before_mib,
    }
    row = next(iter(api.tables["Load_Balancer"].rows.values()))
    (vip,) = row.vips
    took_s = []
    cpu_s = time.process_time()
    for number in range(CHANGES):
        begun_s = time.monotonic()
        new = {vip: f"10.0.0.1:{number}"}
        api.db_set("Load_Balancer", row.uuid, ("vips", new)).execute(check_error=True)
        assert row.vips == new
        took_s.append(time.monotonic() - begun_s)
    figures["change_ms"] = 1000 * statistics.median(took_s)
    figures["change_cpu_ms"] = 1000 * (time.process_time() - cpu_s) / CHANGES
    return figures


def _schema(remote: str) -> dict[str, object]:
    found: dict[str, object] = idlutils.fetch_schema_json(remote, "OVN_Northbound")
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
