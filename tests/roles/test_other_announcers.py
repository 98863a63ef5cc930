"""The check for other announcers concerns what the role announces now, and is part of its state."""

from fairlead.announce_sections import AnnounceConfig, BgpConfig
from fairlead.model import DONE, Announcement, LoadBalancer, ServiceKey
from fairlead.plan.other_announcers import Daemon, HostAnnouncers
from fairlead.roles.other_announcers import OtherAnnouncers
from fairlead.web import View

KEY, VIP = ServiceKey("default", "web"), "203.0.113.10"
HOST = HostAnnouncers({VIP: ["eth0"]}, ["eth0"], [Daemon("FRR", "it listens", "redistribute")])


def codes(view: View, section: AnnounceConfig) -> list[str]:
    return [each.code for each in OtherAnnouncers(section, view, lambda: ["eth0"]).findings(HOST)]


def announcing(*announcements: Announcement) -> View:
    view = View("gateway", "gw1")
    balancer = LoadBalancer(
        KEY, "uid", "fairlead.io/direct", (VIP,), (), announcements=announcements
    )
    view.record({KEY: balancer}, {KEY: DONE})
    return view


def test_only_announced_addresses_and_methods_are_checked() -> None:
    assert codes(announcing(), AnnounceConfig()) == []
    assert codes(announcing(Announcement((VIP,), "l2")), AnnounceConfig()) == ["AddressOnInterface"]
    by_bgp = announcing(Announcement((VIP,), "bgp"))
    assert codes(by_bgp, AnnounceConfig()) == ["AddressOnInterface", "AnotherBgpDaemon"]
    routes = AnnounceConfig(bgp=BgpConfig(speaker="routes"))
    assert codes(by_bgp, routes) == ["AddressOnInterface"]


def test_conflicts_are_findings_about_the_host() -> None:
    view = announcing(Announcement((VIP,), "l2"))
    (finding,) = OtherAnnouncers(AnnounceConfig(), view, lambda: ["eth0"]).findings(HOST)
    view.conflicts = lambda: [finding]
    assert view.state().host == (finding,)
