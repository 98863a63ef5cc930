"""The configuration files of OpenStack's services, as texts.

In: addresses and paths. Out: the text that each service reads. Other options have upstream's
defaults."""

from collections.abc import Mapping
from pathlib import Path

Sections = Mapping[str, Mapping[str, str | int | bool | Path]]

HEARTBEAT_KEY = "heartbeats"
ADMIN_PASSWORD = "administrators"
OCTAVIA_USER, OCTAVIA_PASSWORD, SERVICES = "octavia", "octavias", "service"
"""Octavia's own account, and its project."""
MANAGEMENT_NETWORK = "6b1a7c1e-0000-4000-8000-000000000001"
"""The network in which amphorae would be booted; it is never looked up."""
OUTSIDE = "outside"
"""The physical network of the external network."""
QUIET = ",".join(
    f"{name}=WARN"
    for name in ("octavia.api.app", "sqlalchemy", "oslo_policy", "stevedore", "taskflow", "neutron")
)


def text(sections: Sections) -> str:
    """Return the text in the format of oslo.config."""
    return "".join(
        f"[{name}]\n" + "".join(f"{option} = {value}\n" for option, value in options.items()) + "\n"
        for name, options in sections.items()
    )


def merged(*parts: Sections) -> Sections:
    """Merge sections; options of later parts replace options of earlier parts."""
    whole: dict[str, dict[str, str | int | bool | Path]] = {}
    for part in parts:
        for name, options in part.items():
            whole.setdefault(name, {}).update(options)
    return whole


def octavia(directory: Path, database: str, heartbeats: int) -> Sections:
    """Octavia with provider `amphora`, upstream's no-op drivers in place of machines and networks,
    and no authentication. `heartbeats`: the UDP port for amphorae's heartbeats."""
    return {
        "DEFAULT": {"transport_url": "fake://", "default_log_levels": QUIET, "host": "octavia"},
        "api_settings": {
            "auth_strategy": "noauth",
            "enabled_provider_drivers": "amphora:amphora",
            "default_provider_driver": "amphora",
            "allow_ping_health_monitors": True,
        },
        "database": {"connection": database},
        "controller_worker": {
            "client_ca": directory / "ca.pem",
            "amphora_driver": "amphora_noop_driver",
            "compute_driver": "compute_noop_driver",
            "network_driver": "network_noop_driver",
            "image_driver": "image_noop_driver",
            "volume_driver": "volume_noop_driver",
            "distributor_driver": "distributor_noop_driver",
            "amp_image_tag": "amphora",
            "amp_flavor_id": 1,
            "amp_boot_network_list": MANAGEMENT_NETWORK,
            "amp_secgroup_list": "",
            "workers": 1,
        },
        "health_manager": {
            "heartbeat_key": HEARTBEAT_KEY,
            "bind_ip": "127.0.0.1",
            "bind_port": heartbeats,
        },
        "certificates": {
            "cert_generator": "local_cert_generator",
            "cert_manager": "noop_cert_manager",
            "ca_certificate": directory / "ca.pem",
            "ca_private_key": directory / "ca.key",
        },
        "oslo_messaging": {"topic": "octavia"},
        # Tasks run in sequence in the worker's thread: in threads of their own they would mostly
        # wait for each other.
        "task_flow": {"engine": "serial"},
    }


def octavia_with_neutron(directory: Path, neutron: str, north: str, south: str) -> Sections:
    """Return the differences for an Octavia whose VIPs are ports of Neutron, and which has provider
    `ovn` too. `north`, `south`: OVN's databases. That Neutron has no authentication must be set in
    two sections, because one of them cannot express it."""
    no_token = {"auth_type": "none", "endpoint": neutron}
    return {
        "api_settings": {"enabled_provider_drivers": "amphora:amphora,ovn:ovn"},
        "controller_worker": {"network_driver": "allowed_address_pairs_driver"},
        "networking": {"allow_invisible_resource_usage": True},
        "service_auth": no_token,
        "neutron_auth": no_token,
        "neutron": {"auth_section": "neutron_auth", "endpoint_override": neutron},
        "ovn": {"ovn_nb_connection": north, "ovn_sb_connection": south},
        "driver_agent": {
            **{
                f"{name}_socket_path": directory / f"{name}.sock"
                for name in ("status", "stats", "get")
            },
            "enabled_provider_agents": "ovn",
        },
    }


def neutron(directory: Path, environment: Path, database: str, north: str, south: str) -> Sections:
    """Neutron over OVN, without authentication. `environment`: the path where it is installed."""
    return {
        "DEFAULT": {
            "auth_strategy": "noauth",
            "core_plugin": "ml2",
            "service_plugins": "ovn-router",
            "transport_url": "fake://",
            "state_path": directory,
            "api_paste_config": environment / "etc/neutron/api-paste.ini",
            "default_log_levels": QUIET,
            "notify_nova_on_port_status_changes": False,
            "notify_nova_on_port_data_changes": False,
            "rpc_workers": 0,
            "api_workers": 1,
        },
        "database": {"connection": database},
        "oslo_concurrency": {"lock_path": directory / "lock"},
        "ml2": {
            "mechanism_drivers": "ovn",
            "type_drivers": "geneve,flat",
            "project_network_types": "geneve",
            "extension_drivers": "port_security",
            "overlay_ip_version": 4,
        },
        "ml2_type_geneve": {"vni_ranges": "1:65536", "max_header_size": 38},
        "ml2_type_flat": {"flat_networks": OUTSIDE},
        "securitygroup": {"enable_security_group": True},
        "ovn": {
            "ovn_nb_connection": north,
            "ovn_sb_connection": south,
            "enable_distributed_floating_ip": True,
        },
    }


def octavia_with_keystone(keystone: str, balancers: int) -> Sections:
    """Return the differences for an Octavia with authentication. `keystone`: the URL of its API,
    `balancers`: the quota of a project."""
    account = {
        "auth_url": keystone,
        "auth_type": "password",
        "username": OCTAVIA_USER,
        "password": OCTAVIA_PASSWORD,
        "user_domain_id": "default",
        "project_domain_id": "default",
        "project_name": SERVICES,
    }
    return {
        "api_settings": {"auth_strategy": "keystone"},
        "keystone_authtoken": {"www_authenticate_uri": keystone, **account},
        "service_auth": account,
        "quotas": {"default_load_balancer_quota": balancers},
    }


def keystone(directory: Path, database: str) -> Sections:
    """Keystone, with keys in `tokens` and `credentials` of its directory."""
    return {
        "DEFAULT": {"default_log_levels": QUIET},
        "database": {"connection": database},
        "token": {"provider": "fernet"},
        "fernet_tokens": {"key_repository": directory / "tokens"},
        "fernet_receipts": {"key_repository": directory / "tokens"},
        "credential": {"key_repository": directory / "credentials"},
        "cache": {"enabled": False},
        "identity": {"password_hash_algorithm": "bcrypt", "password_hash_rounds": 4},
    }
