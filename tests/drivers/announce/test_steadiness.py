"""A link that comes and goes moves addresses at most once in the period."""

from fairlead.drivers.announce.steadiness import Steadiness

ETH0, ETH1 = ("eth0", "192.0.2.0/24"), ("eth1", "198.51.100.0/24")
PERIOD_S = 30.0


def settling(made: Steadiness, now_s: float) -> list[str]:
    return [link[0] for link in (ETH0, ETH1) if made.settles(link, now_s)]


def started(*links: tuple[str, str]) -> Steadiness:
    made = Steadiness(PERIOD_S)
    made.look(links, (), 0.0)
    return made


def test_a_start_and_a_new_link_do_not_wait() -> None:
    made = started(ETH0)
    assert settling(made, 0.0) == []
    made.look((ETH0, ETH1), (ETH0,), 1.0)
    assert settling(made, 1.0) == []


def test_a_link_that_others_have_missed_settles_for_the_period() -> None:
    made = started(ETH0, ETH1)
    made.look((ETH1,), (ETH0, ETH1), 10.0)
    made.look((ETH0, ETH1), (ETH1,), 12.0)
    assert settling(made, 41.9) == ["eth0"]
    assert settling(made, 42.0) == []


def test_a_short_loss_that_nobody_has_noticed_changes_nothing() -> None:
    made = started(ETH0)
    made.look((), (ETH0,), 10.0)
    made.look((ETH0,), (ETH0,), 12.0)
    assert settling(made, 12.0) == []


def test_a_gateway_that_could_not_report_the_loss_is_missed_after_the_duration_of_its_lease() -> (
    None
):
    made = started(ETH0)
    made.look((), (ETH0,), 10.0)
    made.look((), (ETH0,), 20.0)
    made.look((ETH0,), (ETH0,), 40.1)
    assert settling(made, 40.1) == ["eth0"]


def test_a_link_that_flaps_settles_until_it_is_steady() -> None:
    """Every second, for ten minutes. Others notice the first loss."""
    made = started(ETH0)
    made.look((), (), 10.0)
    made.look((ETH0,), (), 11.0)
    for second in range(12, 611):
        made.look((ETH0,) if second % 2 else (), (ETH0,), float(second))
        assert settling(made, second) == ["eth0"]
    made.look((ETH0,), (ETH0,), 611.0)
    assert settling(made, 640.9) == ["eth0"]
    assert settling(made, 641.0) == []


def test_a_link_whose_addresses_no_other_gateway_can_have_is_steady() -> None:
    made = started(ETH0)
    made.look((), (), 10.0)
    made.look((ETH0,), (), 11.0)
    made.end(ETH0)
    assert settling(made, 12.0) == []


def test_the_links_of_a_host_that_has_returned_settle_for_one_period() -> None:
    made = started(ETH0)
    made.begin(ETH0, 1.0)
    assert settling(made, 30.9) == ["eth0"]
    assert settling(made, 31.0) == []
