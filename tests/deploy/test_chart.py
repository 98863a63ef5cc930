"""The Helm chart: helm accepts it with every set of values and rejects mistakes with a message; the
plain manifests are rendered from it."""

import base64
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import yaml
from tests.deploy.chart import (
    CHART,
    DEPLOY,
    EVERYTHING,
    NAMESPACE,
    VALUES,
    Manifest,
    capabilities,
    container,
    find,
    pod_spec,
    render,
    run,
)
from tests.deploy.life import PEERS_MOUNT, PEERS_SECRET

from fairlead.announce_sections import AnnounceConfig
from fairlead.config import Config, PeerTLSConfig, parse
from fairlead.drivers.direct.peers.tls import PEER_NAME, PeerTLS
from fairlead.plan.classes import CLASSES

PEER = (
    "config.announce.method=bgp,config.announce.bgp.asn=64513,"
    "config.announce.bgp.peers[0].name=tor,config.announce.bgp.peers[0].asn=64512"
)


def values_of(path: Path | None) -> Sequence[str | Path]:
    return ("--values", path) if path else ()


@pytest.mark.parametrize(
    "values", [None, *VALUES], ids=lambda each: each.stem if each else "default"
)
def test_helm_lint(helm: Path, values: Path | None) -> None:
    done = run(helm, "lint", "--strict", CHART, "--kube-version", "1.36.0", *values_of(values))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("controler.replicas=3", "'controler' not allowed"),
        ("controller.replicas=0", "minimum"),
        ("config.gateway.interfaces=null", "gateway.enabled needs config.gateway.interfaces"),
        ("config.announce.bgp.startDaemon=true", "/config/announce/bgp/startDaemon"),
        ("config.announce.methd=bgp", "'methd' not allowed"),
        ("config.announce.l2.interface=eth1", "'interface' not allowed"),
        ("config.announce.bgp.asn=0", "/config/announce/bgp/asn"),
        ("config.announce.bgp.localPort=65536", "/config/announce/bgp/localPort"),
        (
            f"{PEER},config.announce.bgp.peers[0].adress=192.0.2.1",
            "'adress' not allowed",
        ),
        (
            f"{PEER},config.announce.bgp.peers[0].passwordFile=/etc/password",
            "passwordFile of peer tor in config.announce.bgp.peers cannot be read in a pod",
        ),
        ("node.enabled=true", "node.enabled needs node.apiServer.host"),
        ("config.controller.leaseNamespace=kube-system", "/config/controller/leaseNamespace"),
        ("gateway.listen=192.0.2.1", "/gateway/listen"),
        (
            "config.announce.method=bgp,config.node.announce=true,node.enabled=true,"
            "config.node.serviceProxy=false",
            "set gateway.enabled or config.node.announce to false",
        ),
        (
            "metrics.podMonitor.enabled=true,config.web.metricsFrom={192.0.2.0/24},"
            "controller.enabled=false",
            "metrics.podMonitor.enabled has no target",
        ),
    ],
)
def test_the_message_about_a_wrong_value_names_it(helm: Path, setting: str, words: str) -> None:
    done = run(helm, "template", "fairlead", CHART, "--kube-version", "1.36.0", "--set", setting)
    assert done.returncode != 0
    assert words in done.stderr


def schema_of(section: type[msgspec.Struct]) -> object:
    """Return the schema of a section of the configuration as it is written in the chart."""
    (found,), definitions = msgspec.json.schema_components([section], ref_template="{name}")

    def inlined(node: object) -> object:
        if isinstance(node, list):
            return [inlined(each) for each in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inlined(definitions[node["$ref"]])
        match node.get("anyOf"):
            case [dict() as one, {"type": "null"}]:
                inner = inlined(one)
                assert isinstance(inner, dict)
                return inner | {"type": [inner["type"], "null"]}
        return {
            key: {name: inlined(each) for name, each in value.items()}
            if key == "properties"
            else inlined(value)
            for key, value in node.items()
            if key not in ("title", "description", "default") and (key, value) != ("required", [])
        }

    return inlined(found)


def test_the_schema_of_announce_is_that_of_the_roles() -> None:
    """Except that the chart decides who starts BIRD, and null means no section."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    given = schema["properties"]["config"]["properties"]["announce"]
    assert given["type"] == ["object", "null"]
    assert given["properties"]["bgp"]["properties"]["startDaemon"].pop("not") == {}
    given["type"] = "object"
    given["properties"]["bgp"]["properties"]["startDaemon"] = {"type": "boolean"}
    assert given == schema_of(AnnounceConfig)


def test_gateways_may_have_interfaces_only_per_node(helm: Path) -> None:
    settings = "config.gateway.interfaces=null,config.gateway.interfacesByNode.edge-*={bond0}"
    config = parse(
        find(render(helm, "--set", settings), "ConfigMap", "fairlead")["data"]["fairlead.yaml"],
        "the chart",
        CLASSES,
    )
    assert config.gateway.interfaces_by_node == {"edge-*": ("bond0",)}


def test_pins_must_be_on_the_bpffs_of_the_host(helm: Path) -> None:
    settings = "config.gateway.pinPath=/tmp/pins"
    done = run(helm, "template", "fairlead", CHART, "--kube-version", "1.36.0", "--set", settings)
    assert "/tmp/pins: it must be below /sys/fs/bpf" in done.stderr


def test_the_haproxy_directory_is_writable_for_the_gateway(helm: Path) -> None:
    objects = render(helm)
    spec = pod_spec(objects, "gateway")
    folders = {
        each["mountPath"]: each["name"]
        for each in container(objects, "gateway")["volumeMounts"]
        if not each.get("readOnly")
    }
    assert Path(Config().gateway.proxy_path).parent == Path("/run/fairlead")
    assert {"name": folders["/run/fairlead"], "emptyDir": {}} in spec["volumes"]
    settings = "config.gateway.proxyPath=/tmp/haproxy"
    elsewhere = run(
        helm, "template", "fairlead", CHART, "--kube-version", "1.36.0", "--set", settings
    )
    assert "/tmp/haproxy: it must be below /run/fairlead" in elsewhere.stderr


@pytest.mark.parametrize(
    "values", [None, *VALUES], ids=lambda each: each.stem if each else "default"
)
def test_roles_accept_the_configuration(helm: Path, values: Path | None) -> None:
    objects = render(helm, *values_of(values))
    text = find(objects, "ConfigMap", "fairlead")["data"]["fairlead.yaml"]
    config = parse(text, "the chart", CLASSES)
    assert isinstance(config, Config)
    assert config.controller.lease_namespace == NAMESPACE
    given = (yaml.safe_load(values.read_text()) if values else {}).get("config", {})
    assert [pool.name for pool in config.pools] == [pool["name"] for pool in given.get("pools", [])]
    interfaces = given.get("gateway", {}).get("interfaces", ["default-route"])
    assert list(config.gateway.interfaces) == interfaces
    assert (config.announce is None) == ("announce" in given and given["announce"] is None)


def test_a_node_that_only_decapsulates_has_no_right_to_endpoints(helm: Path) -> None:
    """It needs no address of the API server either, because kube-proxy serves the ClusterIP. The
    program for IPIP needs more capabilities than VXLAN."""
    node = "node.enabled=true,config.node.serviceProxy=false,config.announce=null"
    ipip, vxlan = (
        render(
            helm,
            "--set",
            f"{node},config.tunnel.kind={kind},config.tunnel.gateways={{192.0.2.0/28}}",
        )
        for kind in ("ipip", "vxlan")
    )
    read = {
        resource
        for rule in find(ipip, "ClusterRole", "fairlead-node")["rules"]
        for resource in rule["resources"]
    }
    assert read == {"services", "nodes", "events"}
    assert capabilities(ipip, "node") == ["NET_ADMIN", "BPF", "PERFMON"]
    assert capabilities(vxlan, "node") == ["NET_ADMIN"]
    assert [each["name"] for each in container(ipip, "node")["env"]] == ["NODE_NAME"]


def test_the_default_values_need_only_a_pool(helm: Path) -> None:
    """By default gateways run on all Linux nodes, beside kube-proxy, and announce the addresses in
    the network of the nodes. Accounts exist for all roles, because a role may run elsewhere."""
    objects = render(helm)
    kinds = sorted(each["kind"] for each in objects)
    workloads = [
        each["metadata"]["name"] for each in objects if each["kind"] in ("Deployment", "DaemonSet")
    ]
    assert sorted(workloads) == ["fairlead-controller", "fairlead-gateway"]
    assert not {"PodMonitor", "Service"} & set(kinds)
    assert [each["metadata"]["name"] for each in objects if each["kind"] == "Namespace"] == [
        Config().presence.namespace
    ]
    assert kinds.count("ServiceAccount") == 3
    spec = pod_spec(objects, "gateway")
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert [each["name"] for each in spec["containers"]] == ["fairlead"]
    config = configuration(objects)
    assert config.default_class == "fairlead.io/direct"
    assert config.announce is not None
    assert config.announce.method == "l2"
    assert config.gateway.interfaces == ("default-route",)


def configuration(objects: Sequence[Manifest]) -> Config:
    text = find(objects, "ConfigMap", "fairlead")["data"]["fairlead.yaml"]
    return parse(text, "the chart", CLASSES)


@pytest.mark.parametrize(("values", "role"), [("bgp", "gateway"), ("nodes", "node")])
def test_bird_runs_beside_the_role_that_announces(helm: Path, values: str, role: str) -> None:
    """The role writes the configuration of BIRD into a directory that outlives the pod, and does
    not start BIRD itself."""
    objects = render(helm, "--values", CHART / "ci" / f"{values}-values.yaml")
    config = configuration(objects)
    assert config.announce is not None
    section = config.announce.bgp
    assert not section.start_daemon
    bird, own = container(objects, role, "bird"), container(objects, role)
    mounts = [{each["name"]: each for each in one["volumeMounts"]} for one in (bird, own)]
    assert mounts[0]["bird"] == mounts[1]["bird"]
    assert mounts[0]["bird"]["mountPath"] == section.directory
    (volume,) = (each for each in pod_spec(objects, role)["volumes"] if each["name"] == "bird")
    assert volume["hostPath"]["path"].startswith("/run/")
    assert f"-c {section.directory}/bird.conf" in bird["command"][-1]
    stop = bird["lifecycle"]["preStop"]["exec"]["command"]
    assert stop == ["birdc", "-s", f"{section.directory}/bird.ctl", "graceful", "restart"]
    (files,) = pod_spec(objects, role)["initContainers"]
    assert files["volumeMounts"] == bird["volumeMounts"]
    # Kubernetes expands these two before the shell does.
    assert not [
        each for each in (bird, files) for word in ("$$", "$(") if word in each["command"][-1]
    ]


@pytest.mark.parametrize(
    "setting",
    [
        "config.announce.method=l2,config.announce.bgp.asn=64513",
        "config.announce.method=bgp,config.announce.bgp.speaker=routes",
    ],
)
def test_gateways_and_nodes_may_both_announce_without_a_second_bird(
    helm: Path, setting: str
) -> None:
    both = "config.node.announce=true,node.enabled=true,config.node.serviceProxy=false"
    objects = render(helm, "--set", f"{both},{setting}")
    assert [each["name"] for each in pod_spec(objects, "node")["containers"]] == ["fairlead"]


@pytest.mark.parametrize(
    "setting",
    [
        "config.announce.method=l2",
        "config.announce.bgp.speaker=routes",
        "config.announce=null",
        "gateway.enabled=false,config.announce.method=bgp",
    ],
)
def test_bird_does_not_run_where_no_role_needs_it(helm: Path, setting: str) -> None:
    objects = render(helm, "--set", setting)
    names = [
        each["name"]
        for one in objects
        if one["kind"] in ("Deployment", "DaemonSet")
        for each in one["spec"]["template"]["spec"]["containers"]
    ]
    assert set(names) == {"fairlead"}


def test_passwords_of_sessions_are_the_only_secrets_that_may_be_read(helm: Path) -> None:
    objects = render(helm, "--values", EVERYTHING, "--set", "passwordSecrets={other}")
    for role in ("gateway", "node"):
        rules = find(objects, "Role", f"fairlead-{role}")["rules"]
        assert [(each["resources"], sorted(each["resourceNames"])) for each in rules] == [
            (["secrets"], ["bgp", "other"])
        ]
    assert "fairlead-gateway" not in [
        each["metadata"]["name"] for each in render(helm) if each["kind"] == "Role"
    ]


def test_only_roles_that_announce_have_the_capability_for_it(helm: Path) -> None:
    silent = render(helm, "--set", "config.announce=null")
    assert "NET_RAW" in capabilities(render(helm), "gateway")
    assert "NET_RAW" not in capabilities(silent, "gateway")


def test_a_changed_configuration_starts_new_pods(helm: Path) -> None:
    stamps = {
        find(
            render(helm, "--set", f"config.controller.leaseDurationS={seconds}"),
            "Deployment",
            "fairlead-controller",
        )["spec"]["template"]["metadata"]["annotations"]["fairlead.io/configuration"]
        for seconds in (10, 10, 12)
    }
    assert len(stamps) == 2


def test_every_container_is_confined(helm: Path) -> None:
    objects = render(helm, "--values", EVERYTHING)
    for role in ("controller", "gateway", "node"):
        spec = pod_spec(objects, role)
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in (*spec.get("initContainers", ()), *spec["containers"]):
            assert each["securityContext"]["readOnlyRootFilesystem"]
            assert not each["securityContext"]["allowPrivilegeEscalation"]
            assert "privileged" not in each["securityContext"]
            assert each["resources"]["requests"].keys() == {"cpu", "memory"}
        own = container(objects, role)
        assert own["livenessProbe"]["httpGet"]["path"] == "/healthz"
        assert own["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert capabilities(objects, "controller") == []
    assert capabilities(objects, "gateway", "bird") == ["NET_BIND_SERVICE", "NET_RAW"]


def test_certificates_for_ovn_are_mounted_where_the_configuration_finds_them(helm: Path) -> None:
    spec = pod_spec(render(helm, "--values", EVERYTHING), "controller")
    mount = {"name": "ovn", "mountPath": "/etc/fairlead-ovn", "readOnly": True}
    assert mount in spec["containers"][0]["volumeMounts"]
    assert {"name": "ovn", "secret": {"secretName": "ovn"}} in spec["volumes"]
    tls = yaml.safe_load(EVERYTHING.read_text())["config"]["ovn"]["tls"]
    assert all(path.startswith("/etc/fairlead-ovn/") for path in tls.values())


def test_credentials_of_a_cloud_are_mounted_only_if_a_secret_is_named(helm: Path) -> None:
    objects = render(helm, "--values", EVERYTHING)
    spec = pod_spec(objects, "controller")
    assert {"name": "clouds", "mountPath": "/etc/openstack", "readOnly": True} in spec[
        "containers"
    ][0]["volumeMounts"]
    (volume,) = (each for each in spec["volumes"] if each["name"] == "clouds")
    assert volume["secret"] == {
        "secretName": "openstack",
        "items": [{"key": "clouds.yaml", "path": "clouds.yaml"}],
    }
    without = render(helm)
    assert [each["name"] for each in pod_spec(without, "controller")["volumes"]] == [
        "configuration"
    ]
    ports = [
        sorted(
            {
                port["port"]
                for rule in find(each, "NetworkPolicy", "fairlead-controller")["spec"]["egress"]
                for port in rule["ports"]
            }
        )
        for each in (objects, without)
    ]
    assert ports == [[53, 443, 6641, 8443], [443, 6443]]


def test_metrics_are_not_reachable_until_the_values_name_their_readers(helm: Path) -> None:
    """Two limits: the configuration, which is effective with every network plug-in, and the
    NetworkPolicy."""

    def controller(*options: str | Path) -> tuple[tuple[str, ...], object]:
        objects = render(helm, *options)
        config = parse(
            find(objects, "ConfigMap", "fairlead")["data"]["fairlead.yaml"], "the chart", CLASSES
        )
        return config.web.metrics_from, find(objects, "NetworkPolicy", "fairlead-controller")[
            "spec"
        ]["ingress"]

    port = [{"port": "web", "protocol": "TCP"}]
    assert controller() == ((), [])
    opened = ("--set", "config.web.metricsFrom={10.244.0.0/16}")
    assert controller(*opened) == (("10.244.0.0/16",), [{"ports": port}])
    everything = yaml.safe_load(EVERYTHING.read_text())
    peers = everything["networkPolicy"]["metricsFrom"]
    assert controller("--values", EVERYTHING) == (
        ("10.244.0.0/16",),
        [{"ports": port, "from": peers}],
    )


@pytest.mark.parametrize(
    "setting", ["metrics.podMonitor.enabled=true", "networkPolicy.metricsFrom[0].podSelector.a=b"]
)
def test_a_monitor_without_permitted_sources_is_refused(helm: Path, setting: str) -> None:
    done = run(helm, "template", "fairlead", CHART, "--kube-version", "1.36.0", "--set", setting)
    assert done.returncode
    assert (
        f"{setting.partition('[')[0].partition('=')[0]} needs config.web.metricsFrom" in done.stderr
    )


def test_certificates_of_gateways_are_mounted_at_the_configured_path(helm: Path) -> None:
    objects = render(helm, "--values", EVERYTHING)
    spec = pod_spec(objects, "gateway")
    (mount,) = (each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "peers")
    (volume,) = (each for each in spec["volumes"] if each["name"] == "peers")
    assert volume["secret"]["secretName"] == "peers"
    files = parse(
        find(objects, "ConfigMap", "fairlead")["data"]["fairlead.yaml"], "the chart", CLASSES
    ).gateway.peer_tls
    assert files is not None
    assert [files.certificate, files.key, files.ca] == [
        f"{mount['mountPath']}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")
    ]
    without = pod_spec(render(helm, "--set", "gateway.generatePeersSecret=false"), "gateway")
    assert "peers" not in [each["name"] for each in without["volumes"]]


def test_gateways_get_a_certificate_that_their_peers_accept(helm: Path, tmp_path: Path) -> None:
    """By default the chart generates the certificate, unless gateways have no peers, or the user
    names a certificate."""
    objects = render(helm)
    secret = find(objects, "Secret", PEERS_SECRET)
    spec = pod_spec(objects, "gateway")
    (volume,) = (each for each in spec["volumes"] if each["name"] == "peers")
    assert volume["secret"]["secretName"] == PEERS_SECRET
    files = parse(
        find(objects, "ConfigMap", "fairlead")["data"]["fairlead.yaml"], "the chart", CLASSES
    ).gateway.peer_tls
    assert files is not None
    paths = {}
    for name, path in (("certificate", files.certificate), ("key", files.key), ("ca", files.ca)):
        assert Path(path).parent == Path(PEERS_MOUNT)
        paths[name] = tmp_path / Path(path).name
        paths[name].write_bytes(base64.b64decode(secret["data"][Path(path).name]))
    PeerTLS(PeerTLSConfig(**{name: str(path) for name, path in paths.items()})).load()
    verify = ["openssl", "verify", "-purpose", "any", "-verify_hostname", PEER_NAME]
    done = subprocess.run(
        [*verify, "-CAfile", str(paths["ca"]), str(paths["certificate"])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for setting in (
        "gateway.peersSecret=own",
        "config.gateway.peers=null",
        "config.gateway.peerTLS.certificate=own",
        "gateway.enabled=false",
    ):
        assert "Secret" not in [each["kind"] for each in render(helm, "--set", setting)]


def test_the_configured_lease_is_the_one_that_the_role_permits(helm: Path) -> None:
    for options in ((), ("--values", EVERYTHING)):
        objects = render(helm, *options)
        config = parse(
            find(objects, "ConfigMap", "fairlead")["data"]["fairlead.yaml"], "the chart", CLASSES
        )
        rules = find(objects, "Role", "fairlead-controller")["rules"]
        assert [config.controller.lease_name] in [rule.get("resourceNames") for rule in rules]


def test_no_role_may_write_other_leases_in_the_namespace_of_the_leader(helm: Path) -> None:
    objects = render(helm, "--values", EVERYTHING)
    roles = [each for each in objects if each["kind"] == "Role"]
    assert [
        each["metadata"]["name"]
        for each in roles
        if each["metadata"]["namespace"] == NAMESPACE
        and any("leases" in rule["resources"] for rule in each["rules"])
    ] == ["fairlead-controller"]
    elsewhere = {
        each["metadata"]["namespace"] for each in objects if each["kind"] in ("Role", "RoleBinding")
    } - {NAMESPACE}
    assert elsewhere == {Config().presence.namespace}
    moved = render(helm, "--set", "config.presence.namespace=signs")
    assert [each["metadata"]["name"] for each in moved if each["kind"] == "Namespace"] == ["signs"]
    assert {
        each["metadata"]["namespace"]
        for each in moved
        if each["metadata"]["name"].endswith("-presence")
    } == {"signs"}


def test_plain_manifests_are_the_rendered_chart(helm: Path, tmp_path: Path) -> None:
    subprocess.run(["sh", DEPLOY / "render.sh", tmp_path], check=True, timeout=60)
    rendered = {file.name: file.read_text() for file in tmp_path.iterdir()}
    committed = {file.name: file.read_text() for file in (DEPLOY / "manifests").iterdir()}
    assert rendered == committed, "run `make manifests`"
