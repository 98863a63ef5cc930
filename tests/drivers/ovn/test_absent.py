"""Services that class ovn has claimed, in a configuration without OVN."""

from tests.drivers.ovn.rows import API, WEB

from fairlead.drivers.ovn.absent import NoOvn
from fairlead.errors import Refused


async def test_a_claimed_service_is_neither_removed_nor_moved_to_another_class() -> None:
    driver = NoOvn(lambda key: key == WEB)
    actual = await driver.read([WEB, API])
    outcomes = await driver.apply(driver.diff({}, actual))
    assert {key: each.state for key, each in outcomes.items()} == {WEB: "refused"}
    assert "add the section again" in outcomes[WEB].message
    assert isinstance(driver.obstacle(), Refused)
