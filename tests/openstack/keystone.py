"""An Octavia with authentication, and the Keystone that issues the tokens.

In: a directory. Out: a clouds.yaml with two entries: `member`, an application credential that may
manage load balancers, as a Kubernetes controller would have it, and `reader`, a user with read
access. Octavia's endpoint is in the catalogue; the number of load balancers of a project is
limited."""

import base64
import os
from pathlib import Path
from typing import Any

import openstack
import yaml
from openstack.connection import Connection
from openstack.identity.v3._proxy import Proxy as V3
from tests.openstack import settings
from tests.openstack.octavia import Octavia
from tests.openstack.processes import Processes
from tests.openstack.servers.ready import READY

from fairlead.lab.ports import free_port

BALANCERS = 2
REGION = "R"
DOMAIN = {"user_domain_id": "default", "project_domain_id": "default"}


class Keystone:
    """Keystone and Octavia. Call `start` and `end` once each."""

    def __init__(self, directory: Path, *, balancers: int = BALANCERS) -> None:
        """Prepare both services. `balancers`: the quota of a project."""
        self.directory = directory / "keystone"
        self.directory.mkdir()
        (directory / "octavia").mkdir()
        self.octavia = Octavia(directory / "octavia")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v3"
        self.clouds = self.directory / "clouds.yaml"
        self.catalogue = {"identity": self.url, "load-balancer": self.octavia.url}
        """The endpoint of each service type. Tests add or change entries before the start."""
        self._balancers = balancers
        self._processes = Processes(self.directory)

    def start(self) -> None:
        """Start both, and return when they answer. Raise Refused if they are not installed,
        Unavailable if one does not start."""
        try:
            self._start()
        except BaseException:
            self.end()
            raise

    def _start(self) -> None:
        octavia = self.octavia
        octavia.prepare(settings.octavia_with_keystone(self.url, self._balancers))
        make_keys(self.directory)
        conf = self.directory / "keystone.conf"
        conf.write_text(
            settings.text(settings.keystone(self.directory, octavia.database.url("keystone")))
        )
        self._processes.python("keystone", conf, str(self.port)).await_line(READY)
        served = octavia.serve()
        self._fill()
        served.await_line(READY)

    def end(self) -> None:
        self._processes.end()
        self.octavia.end()

    def connect(self, cloud: str, **auth: str) -> Connection:
        """Return a connection for this entry of clouds.yaml. `auth`: changes to its `auth`
        section."""
        entry = self.entry(cloud)
        entry["auth"] |= auth
        return openstack.connect(load_envvars=False, load_yaml_config=False, **entry)

    def entry(self, cloud: str) -> dict[str, Any]:
        """Return the entry of clouds.yaml."""
        return dict(yaml.safe_load(self.clouds.read_text())["clouds"][cloud])

    def _fill(self) -> None:
        """Create users, roles, the catalogue and clouds.yaml."""
        # The catalogue is empty; not even Keystone is in it.
        first = self._by_password("admin", settings.ADMIN_PASSWORD, "admin") | {
            "identity_endpoint_override": self.url
        }
        identity = openstack.connect(load_envvars=False, load_yaml_config=False, **first).identity
        assert isinstance(identity, V3)
        roles = {role.name: role for role in identity.roles()}
        roles["load-balancer_member"] = identity.create_role(name="load-balancer_member")

        def make_user(user: str, password: str, project: Any, *names: str) -> None:
            who = identity.create_user(name=user, password=password, domain_id="default")
            for name in names:
                identity.assign_project_role_to_user(project, who, roles[name])

        services = identity.create_project(name=settings.SERVICES, domain_id="default")
        make_user(settings.OCTAVIA_USER, settings.OCTAVIA_PASSWORD, services, "admin", "service")
        tenant = identity.create_project(name="tenant", domain_id="default")
        make_user("controller", "controllers", tenant, "member", "load-balancer_member")
        make_user("reader", "readers", tenant, "reader")
        identity.create_region(id=REGION)
        for kind, url in self.catalogue.items():
            service = identity.create_service(type=kind, name=kind)
            for interface in ("public", "internal"):
                identity.create_endpoint(
                    service_id=service.id, interface=interface, url=url, region_id=REGION
                )
        controller = self._by_password("controller", "controllers", "tenant")
        own = openstack.connect(load_envvars=False, load_yaml_config=False, **controller)
        assert isinstance(own.identity, V3)
        wanted = [{"name": "member"}, {"name": "load-balancer_member"}]
        credential = own.identity.create_application_credential(
            str(own.current_user_id), "fairlead", roles=wanted
        )
        member = {
            "auth_type": "v3applicationcredential",
            "auth": {
                "auth_url": self.url,
                "application_credential_id": credential.id,
                "application_credential_secret": credential.secret,
            },
            "region_name": REGION,
        }
        clouds = {"member": member, "reader": self._by_password("reader", "readers", "tenant")}
        self.clouds.write_text(yaml.safe_dump({"clouds": clouds}))

    def _by_password(self, user: str, password: str, project: str) -> dict[str, Any]:
        auth = {
            "auth_url": self.url,
            "username": user,
            "password": password,
            "project_name": project,
            **DOMAIN,
        }
        return {"auth": auth, "region_name": REGION}


def make_keys(directory: Path) -> None:
    """Create the keys that Keystone looks for in its directory, for each kind as `keystone-manage`
    would: the present key and the next one."""
    for kind in ("tokens", "credentials"):
        (directory / kind).mkdir(mode=0o700)
        for name in ("0", "1"):
            (directory / kind / name).write_bytes(base64.urlsafe_b64encode(os.urandom(32)))
