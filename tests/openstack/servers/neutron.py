"""Neutron's API.

In: a neutron.conf, the port to serve on. Runs in OpenStack's environment: `python -m
tests.openstack.servers.neutron CONF PORT`."""

import os
import sys
from typing import Any

from tests.openstack.servers import wsgi


def main() -> None:
    conf, port = sys.argv[1], int(sys.argv[2])
    os.environ["OS_NEUTRON_CONFIG_FILES"] = conf
    sys.argv = ["neutron-server"]
    from neutron.common import wsgi_utils

    # Neutron would query the server that it expects to run in, and without that server OVN's events
    # have no receiver.
    wsgi_utils.get_api_worker_count = lambda: 1
    from neutron.wsgi.api import application

    wsgi.serve(_of_a_project(application), port)


def _of_a_project(application: Any) -> Any:
    """Take the project from the request. Without authentication, Neutron puts all callers into one
    project; here they name their project, as they do to Octavia."""
    from neutron_lib import context

    def with_context(environ: dict[str, Any], start_response: Any) -> Any:
        if project := environ.get("HTTP_X_PROJECT_ID"):
            caller = context.get_admin_context()
            caller.project_id = project
            environ["neutron.context"] = caller
        return application(environ, start_response)

    return with_context


if __name__ == "__main__":
    main()
