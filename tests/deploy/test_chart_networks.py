"""The chart and the roles agree about what is a network, a range of addresses, and an address."""

import json
import re
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import yaml
from tests.deploy.chart import CHART, run

from fairlead.config import parse
from fairlead.errors import Refused
from fairlead.plan.classes import CLASSES

LISTS = {
    "config.cluster.podCIDRs": '{{"cluster": {{"podCIDRs": [{}]}}}}',
    "config.node.interfaces": '{{"node": {{"interfaces": [{}]}}}}',
    "config.pools[0].addresses": '{{"pools": [{{"name": "a", "addresses": [{}]}}]}}',
    "config.gateway.apiServer.addresses": (
        '{{"gateway": {{"apiServer": {{"servers": ["192.0.2.99:6443"], "addresses": [{}]}}}}}}'
    ),
}
"""The path of a list, and a configuration with one item in it."""
ADDRESSES = (
    *("0.0.0.0", "10.0.0.0", "10.96.0.0", "128.0.0.0", "192.0.2.9", "255.255.255.255", "1.2.3"),
    *("127.0.0.1", "126.255.255.255", "128.0.0.1", "169.254.0.1", "169.253.255.255", "224.0.0.1"),
    *(
        "223.255.255.255",
        "240.0.0.0",
        "0.0.0.1",
        "10.0.0.256",
        "10.0.0.010",
        "10.0.0.08",
        "0.0.0.00",
    ),
    *("1.2.3.4.5", ".1.2.3.4", "1.2.3.4.", "1..3.4", "0x0a.0.0.0", "10", "1.2.3.a", "", "a", "a.b"),
    *("::", "::1", "::2", "1::", "::1:0:0", "2001:db8::", "2001:DB8:8000::", "2001:db8::8"),
    *(
        "fd00:1:2:3:4:5:6:7",
        "1:2:3:4:5:6:7:8",
        "1:2:3:4:5:6:7:8:9",
        "1:2:3:4:5:6:7",
        "08::",
        "010::",
    ),
    *("1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "1::3:4:5:6:7:8", "1:2:3:4:5:6:7:8::", "1::2::3"),
    *("::1:2:3:4:5:6:7:8", "1::2:3:4:5:6:7:8", "1:2:3:4::5:6:7:8", ":", ":::", "::::", "1:::2"),
    *(":2001:db8::1", "2001:db8::1:", ":1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7:8:", ":1::", "::1:", "1:"),
    *("12345::", "2001:db8::g", "2001:db8::00001", "2001:db8::0001", "fe80::1", "fe80::1%eth0"),
    *(
        "febf::1",
        "fec0::1",
        "ff00::1",
        "feff::1",
        "::ffff:192.0.2.0",
        "::ffff:c000:200",
        "::ffff:0:0",
    ),
    *(
        "0:0:0:0:0:ffff:c000:200",
        "::fffe:0:0",
        "64:ff9b::192.0.2.0",
        "::192.0.2.0",
        "::1.2.3",
        "::1.2.3.4",
    ),
    *("::192.0.2.256", "::192.0.2.01", "1:2:3:4:5:6:192.0.2.0", "1:2:3:4:5:6:7:192.0.2.0"),
    *("192.0.2.0::", "::192.0.2.0:1", "1:2:3:4:5:192.0.2.0", "1:192.0.2.0", ":192.0.2.0"),
)
LENGTHS = (
    *("/0", "/1", "/8", "/08", "/00", "/016", "/31", "/32", "/33", "/64", "/127", "/128", "/129"),
    *("/", "/+8", "/-1", "/ 8", "/8 ", "/8.", "/8/8", "/999", "/1000", "/0x8", "/255.0.0.0", "//8"),
)
RANGES = (
    *(
        "10.0.0.1-10.0.0.9",
        "10.0.0.1 - 10.0.0.9",
        "10.0.0.1\t-\t10.0.0.9",
        " 10.0.0.1 ",
        "10.0.0.1\n",
    ),
    *("10.0.0.9-10.0.0.1", "10.0.0.1-10.0.0.1", "10.0.0.1-2001:db8::1", "2001:db8::1-10.0.0.1"),
    *("2001:db8::1-2001:db8::ffff", "2001:db8::9-2001:db8::10", "9::-10::", "9.0.0.0-10.0.0.0"),
    *(
        "10.0.0.1-",
        "-10.0.0.1",
        "-",
        "10.0.0.1--10.0.0.9",
        "10.0.0.1-10.0.0.9-10.0.0.12",
        "10.0.0.1 9",
    ),
    *("10.0.0.1-9", "10.0.0.0/24-10.0.0.9", "10.0.0.1-10.0.0.9/24", " 10.0.0.0/24", "10.0.0.0 /24"),
    *(
        "126.0.0.1-127.0.0.1",
        "126.0.0.1-128.0.0.1",
        "::3-::ffff:1.2.3.4",
        "fe00::-ff00::",
        "0.0.0.0/1",
    ),
    *(
        "64.0.0.0/2",
        "192.0.0.0/2",
        "10.0.0.1\u00a0-10.0.0.9",
        "10.0.0.1 " + " " * 120 + "-10.0.0.9",
    ),
    *(
        "10.0.0.1" + " " * 120,
        "10.0.0.1" + " " * 121,
        "\x0b10.0.0.1",
        "10.0.0.1\u2010" + "10.0.0.9",
    ),
)
TEXTS = [
    *("".join(each) for each in product(ADDRESSES, ("", "/32", "/128"))),
    *("".join(each) for each in product(("10.0.0.0", "2001:db8::", "::", "10.0.0.1"), LENGTHS)),
    *RANGES,
]
VERDICTS = """\
problems:
{{- range $path, $texts := .Values.lists }}
{{- range $texts }}
- {{ include "fairlead.networkProblem" (dict "path" (print $path "[0]") "value" .) | toJson }}
{{- end }}
{{- end }}
"""


def accepted_by_the_roles(configuration: str, text: str) -> bool:
    try:
        parse(configuration.format(json.dumps(text)), "the test", CLASSES)
    except Refused:
        return False
    return True


def refused_by_the_schema(helm: Path, folder: Path) -> Iterator[tuple[str, str]]:
    values = folder / "values.json"
    config = {
        "cluster": {"podCIDRs": TEXTS},
        "node": {"interfaces": TEXTS},
        "pools": [{"name": "a", "addresses": TEXTS}],
        "gateway": {"apiServer": {"servers": ["192.0.2.99:6443"], "addresses": TEXTS}},
    }
    values.write_text(json.dumps({"config": config}))
    done = run(helm, "template", "a", CHART, "--kube-version", "1.36.0", "--values", values)
    for path, at in re.findall(r"^ *- at '/(.*)/([0-9]+)':", done.stderr, re.MULTILINE):
        yield path.replace("/0/", "[0]/").replace("/", "."), TEXTS[int(at)]


def refused_by_the_templates(helm: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """The real templates stop at the first mistake. These return what is wrong with each text."""
    chart = folder / "chart"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("{apiVersion: v2, name: a, version: 0.0.0}")
    shutil.copy(CHART / "templates/_networks.tpl", chart / "templates")
    (chart / "templates/verdicts.yaml").write_text(VERDICTS)
    values = folder / "lists.json"
    values.write_text(json.dumps({"lists": dict.fromkeys(LISTS, TEXTS)}))
    done = run(helm, "template", "a", chart, "--values", values)
    assert done.returncode == 0, done.stderr
    problems = yaml.safe_load(done.stdout)["problems"]
    for (path, text), problem in zip(product(sorted(LISTS), TEXTS), problems, strict=True):
        if problem:
            yield path, text


@pytest.fixture(scope="module")
def refused(helm: Path, tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    """The path of a list, and a text that Helm refuses in it."""
    folder = tmp_path_factory.mktemp("networks")
    return {*refused_by_the_schema(helm, folder), *refused_by_the_templates(helm, folder)}


@pytest.mark.parametrize("path", LISTS)
def test_helm_accepts_exactly_the_networks_that_the_roles_accept(
    refused: set[tuple[str, str]], path: str
) -> None:
    name = r"\S{1,15}"  # Helm does not check the length of an interface's name.
    texts = [
        text
        for text in TEXTS
        if path != "config.node.interfaces" or "/" in text or re.fullmatch(name, text)
    ]
    by_roles = {text for text in texts if accepted_by_the_roles(LISTS[path], text)}
    by_helm = {text for text in texts if (path, text) not in refused}
    assert by_helm ^ by_roles == set(), "the one accepts them, the other does not"
    assert len(by_roles) > 20
    assert len(texts) - len(by_roles) > 100
