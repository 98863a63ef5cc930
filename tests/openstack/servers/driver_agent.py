"""octavia-driver-agent, through which provider `ovn` writes the status of its load balancers.

In: an octavia.conf. Runs in OpenStack's environment: `python -m
tests.openstack.servers.driver_agent CONF`."""

import sys
from pathlib import Path

from octavia.cmd import driver_agent
from tests.openstack.servers import sockets


def main() -> None:
    conf = Path(sys.argv[1])
    sockets.place_in(conf.parent)
    sys.argv = ["octavia-driver-agent", "--config-file", str(conf)]
    driver_agent.main()


if __name__ == "__main__":
    main()
