"""The attacks of a tenant leave the bystander's Services alone."""

import pytest
from bench.tenant import measure

pytestmark = [pytest.mark.root, pytest.mark.soak, pytest.mark.usefixtures("real_programs")]


async def test_a_tenant_closes_no_connection_and_takes_no_node_of_another() -> None:
    found = (await measure(["external", "reloads"], real=True)).attacks
    assert list(found["external"].values()) == ["0 of 55 samples"]
    (closed,) = found["reloads"].values()
    assert closed.startswith("0 of ")
