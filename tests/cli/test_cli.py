"""The commands from the view of a user: help texts, tables, JSON, and clear errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fairlead.cli import COMMANDS
from fairlead.plan.classes import CLASSES

ROOT = Path(__file__).parents[2]
PROGRAM = Path(sys.executable).with_name("fairlead")
EXAMPLE = ROOT / "examples" / "plan" / "cluster.yaml"


def run(*argv: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, input=stdin, capture_output=True, text=True, timeout=60, check=False
    )


def fairlead(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run(PROGRAM, *arguments, stdin=stdin)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_the_commands(command: str) -> None:
    done = fairlead(command, "--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) > 8
    assert "Traceback" not in done.stderr


def test_help_of_a_node_mentions_tunnels_and_kube_proxy() -> None:
    words = " ".join(fairlead("node", "--help").stdout.split())
    assert "if kube-proxy runs, set node.serviceProxy to false" in words
    assert "--cleanup Remove the rules of this node and its end of the tunnel" in words
    assert "end of tunnels" in " ".join(fairlead("--help").stdout.split())


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        ("eth0/1", "'eth0/1' is not a CIDR"),
        ("192.0.2.1", "write it as a CIDR"),
        ("", "the text is empty; give the name of an interface, a pattern"),
    ],
)
def test_a_gateway_rejects_an_invalid_selector(selector: str, words: str) -> None:
    done = fairlead("gateway", "--interface", selector)
    assert done.returncode == 2
    assert "Invalid value for '--interface'" in done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_request_to_leave_is_made_or_withdrawn_and_nothing_else() -> None:
    for given, words in ((["--undo"], "--undo needs --leave"), (["--leave", "--cleanup"], "give")):
        done = fairlead("gateway", *given)
        assert done.returncode == 2
        assert words in done.stderr


@pytest.mark.parametrize("role", ["controller", "gateway", "node"])
@pytest.mark.parametrize("listen", ["foo", "127.0.0.1", "127.0.0.1:99999", ":9441", "[::1]", "*:x"])
def test_a_role_rejects_an_invalid_address_before_it_starts(role: str, listen: str) -> None:
    done = fairlead(role, "--listen", listen)
    assert done.returncode == 2
    assert f"Invalid value for '--listen': '{listen}' is not address:port; write" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["node", "--node-name", ""], "'--node-name': the name is empty"),
        (["gateway", "--node-name", " "], "'--node-name': the name is empty"),
        (["gateway", "--pin-path", "pins"], "'--pin-path': 'pins' is relative; write an absolute"),
        (["gateway", "--proxy-path", ""], "'--proxy-path': '' is relative"),
        (["status", "--address", "foo"], "'foo' is not address:port; write an address and a port"),
        (["status", "--address", "[::1"], "'[::1' is not address:port"),
        (["status", "--address", "a b:80"], "'a b:80' is not address:port"),
        (["status", "--address", ""], "'' is not address:port"),
        (["plan", "--config", ""], "'--config': the path is empty, as that of an unset variable"),
        (["controller", "--kubeconfig", ""], "'--kubeconfig': the path is empty"),
        (["ingress", "check", "192.0.2.1", "--timeout", "nan"], "nan is not a number of seconds"),
        (["doctor", "--timeout", "inf"], "'--timeout': inf is not a number of seconds"),
        (["doctor", "-n", "a/b"], "'a/b' is not the name of a namespace; write lower-case"),
        (["plan", "-n", ""], "'' is not the name of a namespace"),
        (["ingress", "nginx", "-n", "A b"], "'A b' is not the name of a namespace"),
        (["ingress", "nginx", "--name", "a_b"], "'a_b' is not a name in Kubernetes"),
    ],
)
def test_options_are_checked_before_anything_is_done(arguments: list[str], words: str) -> None:
    done = fairlead(*arguments)
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.parametrize("command", ["plan", "migrate services", "migrate pools"])
def test_an_empty_path_is_not_the_present_folder(command: str, tmp_path: Path) -> None:
    (tmp_path / "service.yaml").write_text(EXAMPLE.read_text())
    done = subprocess.run(
        (PROGRAM, *command.split(), "-f", ""),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "the path after -f is empty" in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("output", ["table", "json", "yaml"])
def test_an_output_that_cannot_be_written_is_reported(output: str, unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            (PROGRAM, "plan", "-f", EXAMPLE, "-o", output),
            stdout=full,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    *_, last = done.stderr.decode().splitlines()
    assert last == "fairlead: the output cannot be written: No space left on device"
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plna", "there is no command 'plna'; did you mean plan?"),
        ("gatway", "did you mean gateway?"),
        ("statsu", "did you mean status?"),
        ("Node", "did you mean node?"),
        ("xyzzy", "there is no command 'xyzzy'; commands: announce, controller, "),
    ],
)
def test_an_unknown_command_names_similar_ones(name: str, words: str) -> None:
    done = fairlead(name)
    assert done.returncode == 2
    assert words in done.stderr


def test_the_way_back_says_what_services_show_in_between() -> None:
    services = yaml.safe_dump_all(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "annotations": {"fairlead.io/class": "fairlead.io/direct"}},
            "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]},
            "status": {"loadBalancer": {"ingress": [{"ip": address}]}},
        }
        for name, address in (("a", "192.0.2.1"), ("b", "192.0.2.2"))
    )
    done = fairlead("migrate", "back", "--to", "cilium", "-f", "-", stdin=services)
    assert done.returncode == 0
    assert [each["metadata"]["name"] for each in yaml.safe_load_all(done.stdout)] == ["a", "b"]
    assert "kubectl shows its EXTERNAL-IP as <pending>, and it is not served, until cilium" in (
        done.stderr
    )


@pytest.mark.parametrize("group", ["lab", "migrate", "ingress", "octavia"])
def test_the_help_of_a_group_has_whole_sentences(group: str) -> None:
    commands = fairlead(group, "--help").stdout.partition("Commands:")[2]
    assert commands
    assert "..." not in commands
    if group == "lab":
        assert "Make a host fail: disconnect its network and kill all its processes." in " ".join(
            commands.split()
        )


def test_help_loads_no_heavy_modules() -> None:
    code = (
        "import sys, fairlead.cli as c; c.cli(['--help'], standalone_mode=False); "
        "print(sorted(sys.modules), file=sys.stderr)"
    )
    done = run(sys.executable, "-c", code)
    assert "demo" in done.stdout
    for heavy in ("'aiohttp'", "'pyroute2'", "'yaml'", "'msgspec'", "'structlog'"):
        assert heavy not in done.stderr


def test_plan_as_table() -> None:
    done = fairlead("plan", "-f", str(EXAMPLE))
    assert done.returncode == 1, "a Service is refused"
    lines = done.stdout.splitlines()
    assert lines[2].split() == [
        "default/ingress-controller",
        "203.0.113.10:80/TCP",
        "Local",
        "node1",
        "3",
        "75.0",
        "%",
        "active",
    ]
    assert (
        "default/voice: the requested address 198.51.100.7 is in no pool (example); request "
        "another address, or add this one to a pool"
    ) in lines
    assert "default/database: ignored, its class is example.com/other" in lines


def test_plan_says_what_a_port_without_a_node_means() -> None:
    manifests = EXAMPLE.read_text()
    meaning = "(no node): no node can serve this port now, so its connections fail"
    assert meaning not in fairlead("plan", "-f", "-", stdin=manifests).stdout.splitlines()
    empty = "\n".join(each for each in manifests.splitlines() if "nodeName" not in each)
    lines = fairlead("plan", "-f", "-", stdin=empty).stdout.splitlines()
    assert "(no node)" in lines[2]
    assert meaning in lines


POOL = (
    "apiVersion: fairlead.io/v1alpha1\nkind: AddressPool\nmetadata: {name: main}\n"
    "spec: {addresses: [203.0.113.9/24]}\n---\n"
)
CONFIG_MAP = (
    "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: fairlead, namespace: lb}\n"
    "data:\n  fairlead.yaml: |\n    defaultClass: fairlead.io/proxy\n    pools:\n"
    "    - {name: main, addresses: [203.0.113.64/28]}\n---\n"
)


def test_plan_names_the_pools_that_are_not_used() -> None:
    done = fairlead("plan", "-f", "-", stdin=POOL)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "AddressPool main is not used: 203.0.113.9/24 has host bits set (write 203.0.113.0/24); "
        "write addresses, CIDRs or FIRST-LAST in spec.addresses"
    )


def test_plan_uses_the_configuration_among_the_manifests(tmp_path: Path) -> None:
    service = (
        "apiVersion: v1\nkind: Service\nmetadata: {name: web}\n"
        "spec: {type: LoadBalancer, ports: [{port: 80}]}\n"
    )
    done = fairlead("plan", "-f", "-", "-o", "json", stdin=CONFIG_MAP + service)
    assert done.returncode == 0, done.stderr
    (planned,) = json.loads(done.stdout)
    balancer = planned["load_balancer"]
    assert (balancer["class_name"], balancer["addresses"]) == (
        "fairlead.io/proxy",
        ["203.0.113.64"],
    )
    assert done.stderr == ""
    wrong = CONFIG_MAP.replace("64/28", "65/28")
    done = fairlead("plan", "-f", "-", stdin=wrong + service)
    assert done.returncode == 1
    assert "in ConfigMap fairlead of standard input, document 1, line 1: $.pools[0]" in done.stderr
    own = tmp_path / "own.yaml"
    own.write_text("defaultClass: fairlead.io/direct\n")
    done = fairlead("plan", "-f", "-", "--config", str(own), stdin=wrong + service)
    assert "no address pool is configured" in done.stdout


def test_plan_leaves_out_the_addresses_of_nodes_that_the_controller_leaves_out() -> None:
    manifests = EXAMPLE.read_text()
    assert "192.0.2.21" in fairlead("plan", "-f", "-", "-o", "json", stdin=manifests).stdout
    wrong = manifests.replace("192.0.2.21", "192.0.2.300")
    assert "192.0.2.300" not in fairlead("plan", "-f", "-", "-o", "json", stdin=wrong).stdout


OCTAVIA = """
defaultClass: fairlead.io/octavia
octavia: {subnetId: 7f1a5ad1-5a62-4f3c-9a53-8f2f1f8d4f0e}
"""


def test_plan_of_class_octavia_reports_what_only_the_cloud_knows(tmp_path: Path) -> None:
    config = tmp_path / "fairlead.yaml"
    config.write_text(OCTAVIA)
    manifests = EXAMPLE.read_text()
    done = fairlead("plan", "-f", "-", "--config", str(config), stdin=manifests)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[2].split() == [
        "default/ingress-controller",
        "(IPv4",
        "later):80/TCP",
        "Local",
        "node1",
        "3",
        "75.0",
        "%",
        "active",
    ]
    assert "default/database: ignored, its class is example.com/other" in lines
    assert (
        "default/ingress-controller: known later: a new load balancer would be of provider ovn: "
        "with externalTrafficPolicy Local, pods must see the client's address, and this Service "
        "requests no header that carries it; only the cloud knows its address, and whether a load "
        "balancer exists, which would keep its provider and its address families"
    ) in lines
    assert any(
        line.startswith("default/voice: known later: ")
        and "; the API server chooses the node port of 5060/UDP, and the healthCheckNodePort"
        in line
        for line in lines
    )
    done = fairlead("plan", "-f", "-", "--config", str(config), "-o", "json", stdin=manifests)
    by_name = {each["service"]: each for each in json.loads(done.stdout)}
    planned = by_name["default/ingress-controller"]["load_balancer"]
    assert planned["addresses"] == []
    assert (planned["settings"]["type"], planned["settings"]["provider"]) == ("octavia", "ovn")


def test_the_help_of_the_controller_names_every_class() -> None:
    text = " ".join(fairlead("controller", "--help").stdout.split())
    for name in CLASSES:
        assert name in text
    assert "{" not in text


def test_plan_ignores_the_label_that_excludes_nodes_if_the_roles_do(tmp_path: Path) -> None:
    label = "labels: {node.kubernetes.io/exclude-from-external-load-balancers: ''}"
    manifests = EXAMPLE.read_text().replace("{name: node1}", f"{{name: node1, {label}}}")
    pools = "pools: [{name: example, addresses: [203.0.113.0/24]}]\n"
    weights = []
    for ignored in ("false", "true"):
        config = tmp_path / f"{ignored}.yaml"
        config.write_text(
            "defaultClass: fairlead.io/direct\nannounce: {ignoreExcludeLabel: "
            f"{ignored}}}\n{pools}"
        )
        done = fairlead("plan", "-f", "-", "--config", str(config), "-o", "json", stdin=manifests)
        by_name = {entry["service"]: entry for entry in json.loads(done.stdout)}
        (listener, *_) = by_name["default/ingress-controller"]["load_balancer"]["listeners"]
        weights.append(listener["members"][0]["weight"])
    assert weights == [0, 3]


def test_plan_reads_the_addresses_of_nodes_as_the_roles_do() -> None:
    """The API server accepts any text as an address of a Node."""
    manifests = EXAMPLE.read_text().replace("address: 192.0.2.21", "address: 300.1.1.1")
    done = fairlead("plan", "-f", "-", stdin=manifests)
    assert "default/ingress-controller: NodeAddressMissing: node node1 " in done.stdout


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_plan_as_json_and_yaml(form: str) -> None:
    done = fairlead("plan", "-f", "-", "-o", form, stdin=EXAMPLE.read_text())
    planned = json.loads(done.stdout) if form == "json" else yaml.safe_load(done.stdout)
    by_name = {entry["service"]: entry for entry in planned}
    members = by_name["default/ingress-controller"]["load_balancer"]["listeners"][0]["members"]
    assert [(m["node"], m["weight"], m["state"]) for m in members] == [
        ("node1", 3, "active"),
        ("node2", 1, "active"),
        ("node3", 0, "draining"),
    ]
    assert "in no pool" in by_name["default/voice"]["refused"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "apiVersion: v1\nkind: Service\nmetadata: {name: x}\nspec: {ports: [{port: http}]}",
            "'http' is not a whole number - at $.spec.ports[0].port; write a whole number\n",
        ),
        ("a: [", "left out: standard input, document 1, line 2: this is not valid YAML"),
    ],
)
def test_plan_names_the_invalid_input(text: str, words: str) -> None:
    done = fairlead("plan", "-f", "-", stdin=text)
    assert done.returncode == 1
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


NODES = """\
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Node, metadata: {name: one}, status: {addresses: [
    {type: InternalIP, address: 192.0.2.21}]}}
---
"""


def test_plan_shows_a_service_as_the_api_server_would_complete_it() -> None:
    text = """\
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: LoadBalancer
  loadBalancerClass: fairlead.io/proxy
  externalTrafficPolicy: Local
  selector: {app: web}
  ports: [{name: http, port: 80}, {name: https, port: 443, nodePort: 30443}]
"""
    done = fairlead("plan", "-f", "-", "-o", "json", stdin=NODES + text)
    assert done.returncode == 0, done
    (planned,) = json.loads(done.stdout)
    assert planned["known_later"] == (
        "the API server chooses the node port of 80/TCP, and the healthCheckNodePort; the members, "
        "because the manifests have no EndpointSlice of it"
    )
    balancer = planned["load_balancer"]
    ports = [(each["port"], each["node_port"]) for each in balancer["listeners"]]
    assert ports == [(80, 0), (443, 30443)]
    assert not balancer.get("health_monitor")
    assert not balancer.get("notes")


def test_plan_reports_what_it_leaves_out_and_plans_the_rest() -> None:
    text = f"""\
{NODES}
apiVersion: v1
kind: Service
metadata: {{name: web}}
spec: {{type: LoadBalancer, ports: [{{port: 80, protocl: UDP}}], type: LoadBalancer}}
---
apiVersion: [
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: web}}
"""
    done = fairlead("plan", "-f", "-", stdin=text)
    assert done.returncode == 1
    assert "203.0.113.10:80/TCP" in done.stdout
    assert done.stderr.splitlines()[1:] == [
        "note: standard input, document 2, line 8: type in line 11 has no effect, because line 11 "
        "sets it again",
        "left out: standard input, document 3, line 14: this is not valid YAML: while parsing a "
        "flow node, did not find expected node content",
        "note: default/web: spec.ports[0].protocl is not a field of a Service and has no effect: "
        "kubectl refuses it; did you mean protocol?",
        "not read, because other kinds play no part: 1 Deployment",
    ]


def test_plan_names_the_namespace_without_services() -> None:
    done = fairlead("plan", "-f", str(EXAMPLE), "-n", "nosuch")
    assert (done.returncode, done.stdout) == (
        0,
        "no Service of type LoadBalancer in namespace nosuch\n",
    )


def test_without_root_the_error_names_commands_that_work() -> None:
    # In a user namespace without a mapping the same files can be read, but the process is not root.
    unprivileged: list[str | Path] = ["unshare", "--user", PROGRAM]
    for command, words in (
        ("gateway", "fairlead plan"),
        ("node", "root"),
        ("demo", "root"),
        ("lab", "root"),
    ):
        arguments = [command] if command != "lab" else ["lab", "up"]
        done = run(*unprivileged, *arguments)
        assert done.returncode == 1, done
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    done = run(*unprivileged, "plan", "-f", str(ROOT / "examples" / "pools"))
    assert done.returncode == 0, done.stderr


def test_status_without_a_role_gives_a_remedy() -> None:
    done = fairlead("status", "--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert "is a role running here" in done.stderr


def test_the_example_of_pools_is_planned_as_documented() -> None:
    done = fairlead("plan", "-f", str(ROOT / "examples" / "pools"), "-o", "json")
    planned = {
        each["service"]: each["load_balancer"]["addresses"] for each in json.loads(done.stdout)
    }
    assert planned == {
        "default/dns": ["203.0.113.1"],
        "default/mail-imap": ["203.0.113.2"],
        "default/mail-smtp": ["203.0.113.2"],
        "default/printer": ["203.0.113.3"],
        "default/storefront": ["203.0.113.4"],
    }
