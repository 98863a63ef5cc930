"""Documents of manifests: each is read as kubectl reads it, and none hides another."""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.lab.apiserver.kubectl import Program, installed, program_at

from fairlead.kube.documents import read_contents

VALUES = """\
plain text
22:30
1:2:3
=
y
n
Yes
oFF
on
true
~
null
Null
nULL
12
+12
-12
0
-0
00
012
0o12
0O12
089
0x1F
-0x1f
0b101
-0b11
0b2
0x
1_000
_1
1__0
1.5
1.0
80.0
.5
-.5
+.5
5.
1e3
1E-7
1.5e+3
1e999
1e25
1e20
.e3
._5
0.1e-9
12e
1.2.3
10.0.0.1
9223372036854775807
9223372036854775808
18446744073709551615
18446744073709551616
-9223372036854775808
-9223372036854775809
+9223372036854775808
0xffffffffffffffff
0x1ffffffffffffffff
2026-01-31
2026-01-31T12:00:00Z
2026-01-31 12:00:00
.inf
-.INF
.nan
"22"
'y'
"~"
!!str 22
!!str ~
!!int "3"
!!int 3.5
!!int x
!!float 3
!!float "2.5"
!!bool "yes"
!!bool 1
!!null ""
!!null x
!!binary aGVsbG8=
!!binary "%%"
!!timestamp 2026-01-31
!own 22
! 22
! "22"
<<
""
''
[1, y, =, 22:30]
[]
[1, , 2]
{}
{a: , b: ~}
{1: a, 1.5: b, y: c, 0x10: d, ~: e}
{1: a, y: c, 0x10: d}
{1.5: a, 2.0: b}
{[a]: b}
{? {a: b} : c}
{a: 1, a: 2}
{"a":1}
{a: b: c}
[a, b
"tab\\tin"
"\\u00e9\\x41"
"\\q"
'it''s'
&a {b: 1}
*nowhere
[&a 1, *a]
[&a 1, &a 2, *a]
&a [*a]
{<<: {a: 1}, b: 2}
{b: 2, <<: {b: 1}}
{<<: [{a: 1}, {a: 2, c: 3}]}
{<<: 3}
{<<: [3]}
{"<<": {a: 1}}
@at
`tick
%percent
- a
text # comment
text#no comment
"text"#no space
a: b
key:value
|
>-
!!set {a, b}
!!omap [a: 1]
""".splitlines()
"""Values of a field, one a line."""

OBJECT = "apiVersion: example.org/v1\nkind: Thing\nmetadata: {name: %s}\n"
FIRST, SECOND = OBJECT % "first", OBJECT % "second"
JSON = '{"apiVersion": "example.org/v1", "kind": "Thing", "metadata": {"name": "json"}'
"""An object without its closing brace."""
FILES = {
    "two": f"{FIRST}---\n{SECOND}",
    "leading separator": f"---\n{FIRST}---\n{SECOND}---\n",
    "empty documents": f"---\n---\n# nothing\n---\n\n---\nnull\n---\n~\n---\n{FIRST}",
    "comment after separator": f"{FIRST}--- # the second\n{SECOND}",
    "comment without space": f"{FIRST}---# the second\n{SECOND}",
    "spaces after separator": f"{FIRST}---   \t\n{SECOND}",
    "text after separator": f"{FIRST}--- {{a: b}}\n",
    "tag after separator": f"{FIRST}--- !own\n{SECOND}",
    "four dashes": f"{FIRST}----\n{SECOND}",
    "end of document": f"{FIRST}...\n---\n{SECOND}",
    "text after the end": f"{FIRST}...\n{SECOND}",
    "directive": f"%YAML 1.1\n---\n{FIRST}",
    "tag directive": f"%TAG ! tag:example.org,2026:\n---\n{FIRST}",
    "CRLF": f"{FIRST}---\n{SECOND}text: |\n  one\n  two\n".replace("\n", "\r\n"),
    "byte order mark": f"\ufeff{FIRST}---\n{SECOND}",
    "byte order mark and separator": f"\ufeff---\n{FIRST}",
    "separator in a block": f"{FIRST}text: |\n  a\n  ---\n  b\n---\n{SECOND}",
    "separator in quotes": f'{FIRST}text: "a\n---\nb"\n',
    "indented separator": f"{FIRST}text:\n  - a\n ---\n  - b\n",
    "no end of line": f"{FIRST}---\n{SECOND}".rstrip(),
    "separator at the end": f"{FIRST}---",
    "blocks": f"{FIRST}a: |+\n  x\n\nb: >-\n  y\n  z\nc: |2\n    w\n",
    "tab": f"{FIRST}spec:\n\ta: b\n",
    "tab after a colon": f"{FIRST}spec:\ta\n",
    "template": FIRST + "spec: {{ .Values.spec }}\n",
    "template as text": FIRST + "spec: x {{ .Values.spec }}\n",
    "bad indentation": f"{FIRST}spec:\n   a: 1\n  b: 2\n",
    "anchors": f"{FIRST}a: &x {{p: 1, q: [y]}}\nb: *x\nc: {{<<: *x, p: 2}}\nd: [*x]\n",
    "merge of a list": f"{FIRST}a: &x {{p: 1}}\nb: &y {{p: 2, q: 3}}\nc:\n  <<: [*x, *y]\n",
    "anchor of another document": f"{FIRST}a: &x 1\n---\n{SECOND}b: *x\n",
    "duplicate": f"{FIRST}metadata: {{name: other}}\n",
    "many aliases": FIRST
    + "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(
        f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcde", "bcdef", strict=True)
    ),
    "control character": f"{FIRST}a: \x01\n",
    "line separator": f"{FIRST}a: x\u2028y\n",
    "emoji": f"{FIRST}a: \U0001f600\n",
    "text": "just a text\n",
    "list": "- a\n- b\n",
    "nothing": "",
    "comment": "# nothing\n",
    "JSON": JSON + "}",
    "JSON stream": (JSON + "}") * 3,
    "JSON and separators": f"{JSON}}}\n---\n{SECOND}",
    "JSON with a comma": JSON + ",}",
    "JSON with a comment": f"# c\n{JSON}}}",
    "JSON with a duplicate": JSON + ', "metadata": {"name": "other"}}',
    "JSON with numbers": JSON + ', "a": 9223372036854775807, "b": 1.0, "c": 1e3, "d": 1e-7}',
    "JSON in lines": f"{JSON}\n}}\n\n{JSON}}}\n".replace(",", ",\n"),
    "JSON after space": f"\n  {JSON}}}",
    "JSON that ends": JSON,
    "NaN in JSON": JSON + ', "x": NaN}',
    "flow mapping": "{apiVersion: example.org/v1, kind: Thing, metadata: {name: a}}\n",
    "flow mappings": "{apiVersion: example.org/v1, kind: Thing, metadata: {name: a}}\n---\n"
    "{apiVersion: example.org/v1, kind: Thing, metadata: {name: b}}\n",
}


NEWER = ("JSON and separators", "JSON with a comma", "NaN in JSON", "flow mapping", "flow mappings")
"""Files that kubectl reads since 1.33: one that begins with `{` may be YAML."""


def test_documents_are_read_as_kubectl_reads_them(tmp_path: Path) -> None:
    program = newest_kubectl()
    cases = FILES | {f"value {value}": f"{FIRST}spec: {value}\n" for value in VALUES}
    if program.version.split(".") < ["1", "33"]:
        cases = {name: text for name, text in cases.items() if name not in NEWER}
    # The version in its apiVersion tells from which case an object is.
    texts = {
        name: text.replace("example.org/v1", f"example.org/v{index}")
        for index, (name, text) in enumerate(cases.items())
    }
    for index, text in enumerate(texts.values()):
        (tmp_path / f"{index}.yaml").write_bytes(text.encode())
    theirs = read_by_kubectl(program, tmp_path)
    different = {
        name: found
        for index, (name, text) in enumerate(texts.items())
        if not agree(found := read_here(text), theirs.get(index, []))
    }
    assert not different


def agree(ours: list[Any], theirs: list[Any]) -> bool:
    """Return whether the same objects were read. kubectl stops at the first document that it cannot
    read, and then may not return the one before it either."""
    if theirs[-1:] != ["bad"]:
        return ours == theirs
    return "bad" in ours and ours[: len(theirs) - 1] == theirs[:-1]


def newest_kubectl() -> Program:
    """Return the newest kubectl of this machine, also from the cache that `make tools` fills."""
    cached = Path.home() / ".cache/fairlead/bin/kubectl"
    programs = [*installed(), *([program_at(cached)] if cached.exists() else [])]
    assert programs, "kubectl is needed: apt-get install kubernetes-client, or make tools"
    return max(programs, key=lambda each: [int(part) for part in each.version.split(".")])


def read_here(text: str) -> list[Any]:
    """Return the objects before the first document that cannot be read, which ends as `bad`."""
    found: list[Any] = []
    for content in read_contents(text):
        if content.problem or not isinstance(content.value, dict):
            return [*found, "bad"]
        found.append(content.value)
    return found


def read_by_kubectl(program: Program, folder: Path) -> Mapping[int, list[Any]]:
    """Return the objects that kubectl reads from each file, and `bad` where it stops reading."""
    ran = subprocess.run(
        [program.path, "label", "--local", "-f", folder, "-o", "json", "read=yes"],
        capture_output=True,
        text=True,
        check=False,
        env={"HOME": str(folder), "KUBECONFIG": "/dev/null"},
    )
    found: dict[int, list[Any]] = {}
    for each in values(ran.stdout):
        del each["metadata"]["labels"]
        number = int(each["apiVersion"].removeprefix("example.org/v"))
        found.setdefault(number, []).append(each)
    for number in re.findall(rf"{folder}/(\d+)\.yaml", ran.stderr):
        found.setdefault(int(number), []).append("bad")
    return found


def values(text: str) -> Iterator[Any]:
    """Yield the values of a stream of JSON."""
    position, decoder = 0, json.JSONDecoder(parse_int=json_integer)
    while position < len(text):
        value, position = decoder.raw_decode(text, position)
        yield value
        while position < len(text) and text[position].isspace():
            position += 1


def json_integer(text: str) -> int | float:
    """Return an integer as kubectl decodes it: as a floating-point number beyond 64 bits."""
    return int(text) if -(1 << 63) <= int(text) < 1 << 63 else float(text)


def test_a_document_that_cannot_be_read_hides_no_other() -> None:
    text = f'{FIRST}---\na: [\n---\n{SECOND}--- !x\n{FIRST}---\n{SECOND}spec: "\x01"\n---\n{FIRST}'
    contents = list(read_contents(text))
    assert [(each.number, each.line, bool(each.problem)) for each in contents] == [
        (1, 1, False),
        (2, 6, True),
        (3, 7, False),
        (4, 10, True),
        (5, 15, True),
        (6, 20, False),
    ]
    stream = '{"a": 1}{"b": 2}\n{"c": }\n---\nd: 4\n'
    assert [(each.number, each.line, each.value) for each in read_contents(stream)] == [
        (1, 1, {"a": 1}),
        (2, 1, {"b": 2}),
        (3, 2, None),
        (4, 4, {"d": 4}),
    ]


def test_values_that_kubectl_ignores_in_silence_are_reported() -> None:
    (content,) = read_contents("a: 1\nb: 2\na: 3\n...\nc: 4\n")
    assert content.value == {"a": 3, "b": 2}
    assert content.remarks == (
        "a in line 1 has no effect, because line 3 sets it again",
        "what follows the end of the document in line 4 is ignored",
    )


def test_text_that_is_not_utf_8_concerns_only_its_document() -> None:
    text = b"a: \xff\n---\nb: 1\n".decode("utf-8", "surrogateescape")
    first, second = read_contents(text)
    assert (second.problem, first.problem.rpartition("; ")[2]) == ("", "is it a text in UTF-8?")


def test_a_deeply_nested_document_is_not_read() -> None:
    for text in ("[" * 100_000, "a: " + "[" * 5000 + "]" * 5000, '{"a":' * 100_000, "- " * 5000):
        (content,) = read_contents(text)
        assert content.problem
