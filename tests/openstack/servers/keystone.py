"""Keystone's API.

In: a keystone.conf, the port to serve on. Runs in OpenStack's environment: `python -m
tests.openstack.servers.keystone CONF PORT`."""

import os
import sys

from tests.openstack.servers import wsgi


def main() -> None:
    conf, port = sys.argv[1], int(sys.argv[2])
    os.environ["OS_KEYSTONE_CONFIG_FILES"] = conf
    sys.argv = ["keystone"]
    from keystone.server.wsgi import initialize_public_application

    wsgi.serve(initialize_public_application(), port)


if __name__ == "__main__":
    main()
