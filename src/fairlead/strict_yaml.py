"""Read YAML that a person has written, and refuse what the author cannot have meant.

In: text. Out: the value of its only document. A name that occurs twice in one mapping is an error,
because PyYAML would use the last value and drop the others without a word. Pure."""

from typing import Any

import yaml

from fairlead.errors import Refused, plain

MERGE = "tag:yaml.org,2002:merge"
MAX_DEPTH = 200
"""PyYAML reads nested values by recursion, which ends the process if there are very many levels."""


class _Twice(Exception):
    """A name occurs twice in a mapping."""


class _TooDeep(Exception):
    """A value is nested deeper than `MAX_DEPTH`."""


class _Loader(yaml.CSafeLoader):
    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Check the names of a mapping before other mappings are merged into it (`<<`)."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise _Twice(f"line {line}: {key.value} is in line {lines[key.value]} already")
                lines[key.value] = line
        super().flatten_mapping(node)


def _check_depth(text: str | bytes) -> None:
    depth = 0
    for event in yaml.parse(text, yaml.CSafeLoader):
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                mark = event.start_mark
                where = f"line {mark.line + 1}: " if mark is not None else ""
                raise _TooDeep(f"{where}it is nested deeper than {MAX_DEPTH} levels")


def read(text: str | bytes, source: str) -> Any:
    """Return the document in the text; None if it is empty. `source`: what was read, for error
    messages. Raise Refused if it is not valid YAML, or a name occurs twice in a mapping."""
    try:
        _check_depth(text)
        return yaml.load(text, _Loader)
    except _TooDeep as problem:
        raise Refused(f"{source}, {problem}", fix="is this the right file?") from None
    except _Twice as problem:
        raise Refused(f"{source}, {problem}", fix="remove one of the two") from None
    except yaml.YAMLError as problem:
        raise Refused(
            f"{source} is not valid YAML: {plain(problem)}",
            fix="correct this place; the cause may be an indentation or a missing quote before it",
        ) from None
    except ValueError as problem:  # a date that does not exist
        raise Refused(
            f"{source} is not valid YAML: {plain(problem)}", fix="write texts in quotes"
        ) from None
