"""Write the part of the chart's values.schema.json that describes `config`, which is fairlead.yaml,
so that Helm refuses what the roles would refuse: `python tools/schema.py PATH`.

In: the file, and the structs of `fairlead.config`. Out: the file with `properties.config`, and the
definitions with capital names, as these structs need them; the rest of the file stays as it is. A
schema cannot express everything: `fairlead.config.check` compares fields with each other."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from fairlead.config import Config
from fairlead.plan.classes import CLASSES

Schema = dict[str, Any]
OF_RELEASE = "The Lease is always in the namespace of the release: the Role allows no other."


def with_config(text: str) -> str:
    """Return the text of values.schema.json with the present schema of `config`."""
    _, components = msgspec.json.schema_components([Config], ref_template="#/definitions/{name}")
    made = {name: _plain(each) for name, each in components.items()}
    config = made.pop("Config")
    classes = "|".join(map(re.escape, sorted(CLASSES)))
    config["properties"]["defaultClass"]["pattern"] = f"^({classes})$"
    lease_namespace = {"description": OF_RELEASE, "not": {}}
    made["ControllerConfig"]["properties"]["leaseNamespace"] = lease_namespace
    whole = json.loads(text)
    whole["properties"]["config"] = {"description": "fairlead.yaml", **config}
    written = {name: each for name, each in whole["definitions"].items() if name.islower()}
    whole["definitions"] = written | dict(sorted(made.items()))
    return f"{json.dumps(whole, indent=2)}\n"


def _plain(schema: Any) -> Any:
    """Return a schema without titles and defaults, which Helm does not use, and with the type
    `null` beside another one where a text or a number may be absent."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain: Schema = {
        name: (
            {field: _plain(each) for field, each in value.items()}
            if name == "properties"
            else _plain(value)
        )
        for name, value in schema.items()
        if name not in ("title", "default") and (name, value) != ("required", [])
    }
    if "description" in plain:
        plain["description"] = " ".join(plain["description"].split())
    match plain.pop("anyOf", None):
        case None:
            return plain
        case [{"type": str(kind), **rest}, {"type": "null"}]:
            return plain | rest | {"type": [kind, "null"]}
        case [section, {"type": "null"}]:
            either = {"type": ["object", "null"]}
            # With `anyOf`, Helm would report every mistake inside of the section as two.
            return plain | {"if": {"type": "object"}, "then": section, "else": either}
        case options:
            return plain | {"anyOf": options}


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_config(path.read_text()))
