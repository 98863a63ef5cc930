"""Every call to the API server that a role can make, read from the role's source.

In: the name of a role, which is a command of `cli/roles.py`. Out: the rights that the role's calls
need. Invariant: no call is missed silently. A role can name an object of the API only by a
`Resource`. Each mention of a Resource in code that the role reaches is a call of a method of
`Client`, a reflector, or one of the harmless uses below; any other mention, and any call with a raw
path, raises `Unreadable`. Code counts as reached if other reached code names it; a class is reached
with all its methods. The result may therefore contain more rights than a role needs, but never
fewer."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import fairlead
from fairlead.kube.client import Client

VERBS = {
    "get": ("get",),
    "list": ("list",),
    "page": ("list",),
    "pages": ("list",),
    "read_page": ("list",),
    "stream": ("watch",),
    "create": ("create",),
    "replace": ("update",),
    "patch": ("patch",),
    "delete": ("delete",),
}
"""The verb of each method of `Client`. See `_verbs` for `apply`; `request` has no verb of its
own."""
HARMLESS_FIELDS = {"group_version", "kind", "plural", "namespaced", "type"}
"""Fields of a Resource that make no call. `path` is not among them."""
HARMLESS_CALLS = {"event_about"}
"""An Event's subject is not read."""
FOLLOWERS = {"_follow", "Reflector"}
"""Functions that hand a Resource, their second argument, to a reflector."""
TAKES_A_RESOURCE = {
    ("fairlead.roles.process", "_follow"),
    ("fairlead.kube.reflector", "Reflector"),
    ("fairlead.kube.events", "EventRecorder"),
    ("fairlead.kube.client", "Client"),
    ("fairlead.kube.client", "object_path"),
}
"""All code with a parameter of type Resource. Its use of the parameter is declared above, or in the
table of `Client`'s methods."""
RAW_CALLS = {
    "fairlead.kube.client",
    "fairlead.kube.connection",
    "fairlead.drivers.neighbors.watcher",
    "fairlead.drivers.octavia.cloud",
}
"""Modules that may call with a raw path: the client itself, and the module for OpenStack. The
requests of the watcher are frames of ARP."""


class Unreadable(Exception):
    """A place in the code whose API calls cannot be determined from its text."""


class Unit(NamedTuple):
    """A top-level definition of a module: a function, a class, a constant. An empty name stands for
    all other statements."""

    module: str
    name: str


RESOURCE = Unit("fairlead.kube.objects", "Resource")
OF_OPERATORS = {Unit("fairlead.cli.roles", "_leave")}
"""What the command of a role does with the rights of the operator who calls it (`gateway --leave`),
and never as the role's account."""


class Right(NamedTuple):
    """`resource` is `plural.group`, with its subresource after a slash."""

    verb: str
    resource: str


class Module:
    """A module's definitions and the meaning of its imports."""

    def __init__(self, name: str, text: str) -> None:
        tree = ast.parse(text)
        self.units: dict[str, list[ast.stmt]] = {}
        self.imports: dict[str, dict[str, set[tuple[str, str]]]] = {}
        """What a name may stand for: in each unit, whose imports are valid only inside it, and in
        all other statements."""
        for statement in tree.body:
            for defined in _defines(statement) or [""]:
                self.units.setdefault(defined, []).append(statement)
                self._read_imports(name, defined, statement)

    def _read_imports(self, name: str, defined: str, statement: ast.stmt) -> None:
        imports = self.imports.setdefault(defined, {})
        for node in ast.walk(statement):
            if isinstance(node, ast.ImportFrom) and (
                node.level or (node.module or "").startswith("fairlead")
            ):
                if node.level or any(alias.name == "*" for alias in node.names):
                    raise Unreadable(
                        f"{name}:{node.lineno}: an import that does not name what it imports, or "
                        "whence"
                    )
                for alias in node.names:
                    imports.setdefault(alias.asname or alias.name, set()).add(
                        (node.module or "", alias.name)
                    )
            elif isinstance(node, ast.Import) and any(
                alias.name.startswith("fairlead") for alias in node.names
            ):
                raise Unreadable(f"{name}:{node.lineno}: write `from ... import ...`")


class Source:
    """The code of Fairlead below a folder."""

    def __init__(self, root: Path = Path(fairlead.__file__).parent) -> None:
        self._root = root
        self._modules: dict[str, Module] = {}

    def rights(self, role: str) -> dict[Right, list[str]]:
        """Return the rights that a role's calls need, each with the places that need it:
        `file:line`."""
        found: dict[Right, list[str]] = {}
        for unit in sorted(self.reached(Unit("fairlead.cli.roles", role))):
            for right, line in self._rights_of(unit):
                found.setdefault(right, []).append(f"{unit.module.replace('.', '/')}.py:{line}")
        return found

    def reached(self, start: Unit) -> frozenset[Unit]:
        """Return the unit and all units that it names, directly or through others."""
        known: set[Unit] = set()
        waiting = [start]
        while waiting:
            unit = waiting.pop()
            if unit in known or unit in OF_OPERATORS:
                continue
            known.add(unit)
            waiting += [*self._named_in(unit), Unit(unit.module, "")]
        return frozenset(known)

    def _resolve(self, unit: Unit, name: str) -> set[Unit]:
        """Return the units that a name may refer to inside a unit. Empty: it is a variable, or
        belongs to another package."""
        module = self._module(unit.module)
        found = {Unit(unit.module, name)} if name in module.units else set()
        for scope in (unit.name, ""):
            for other, original in module.imports.get(scope, {}).get(name, ()):
                if self._file(f"{other}.{original}").is_file():
                    found.add(Unit(f"{other}.{original}", ""))
                else:
                    found |= self._resolve(Unit(other, ""), original)
        return found

    def _nodes(self, unit: Unit) -> Iterator[ast.AST]:
        for statement in self._module(unit.module).units.get(unit.name, ()):
            yield from ast.walk(statement)

    def _named_in(self, unit: Unit) -> Iterator[Unit]:
        for node in self._nodes(unit):
            if isinstance(node, ast.Name):
                yield from self._resolve(unit, node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                for base in self._resolve(unit, node.value.id):
                    if not base.name:
                        yield from self._resolve(base, node.attr)

    def _resource(self, unit: Unit) -> str | None:
        """Return `plural.group` of a constant that is a Resource, else None."""
        for statement in self._module(unit.module).units.get(unit.name, ()) if unit.name else ():
            match statement:
                case ast.Assign(
                    value=ast.Call(func=ast.Name(id="Resource"), args=[version, _, plural, *_])
                ):
                    if isinstance(version, ast.Name):
                        (assigned,) = self._module(unit.module).units[version.id]
                        assert isinstance(assigned, ast.Assign)
                        version = assigned.value
                    group, slash, _ = ast.literal_eval(version).partition("/")
                    name: str = ast.literal_eval(plural)
                    return f"{name}.{group}" if slash else name
        return None

    def _rights_of(self, unit: Unit) -> Iterator[tuple[Right, int]]:
        parents = {
            child: node for node in self._nodes(unit) for child in ast.iter_child_nodes(node)
        }
        for node in self._nodes(unit):
            self._refuse_unreadable(unit, node, parents.get(node))
            for resource in self._resources(unit, node):
                for right in self._use(unit, node, parents[node], resource):
                    yield right, getattr(node, "lineno", 0)

    def _resources(self, unit: Unit, node: ast.AST) -> set[str]:
        """Return the Resources that this piece of code may mention: `SERVICES`, or
        `objects.SERVICES`."""
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                named = self._resolve(unit, name)
            case ast.Attribute(value=ast.Name(id=base), attr=name):
                named = {
                    each
                    for module in self._resolve(unit, base)
                    if not module.name
                    for each in self._resolve(module, name)
                }
            case _:
                return set()
        return {resource for each in named if (resource := self._resource(each))}

    def _refuse_unreadable(self, unit: Unit, node: ast.AST, parent: ast.AST | None) -> None:
        match node:
            case ast.Call(func=ast.Name(id=name)) if RESOURCE in self._resolve(unit, name) and not (
                isinstance(parent, ast.Assign) and self._resource(unit)
            ):
                raise Unreadable(
                    f"{unit}: line {node.lineno}: a Resource that is no constant of a module"
                )
            case ast.Call(func=ast.Attribute(attr="request")) if unit.module not in RAW_CALLS:
                raise Unreadable(
                    f"{unit}: line {node.lineno}: a call by its path, with an unknown right"
                )
            case ast.Constant(value=str(text)) if (
                text.startswith(("/api/", "/apis/")) and unit.module != "fairlead.kube.objects"
            ):
                raise Unreadable(
                    f"{unit}: line {node.lineno}: a path of the API, with an unknown right"
                )
            case ast.arg(annotation=ast.AST() as annotation) if any(
                isinstance(each, ast.Name) and RESOURCE in self._resolve(unit, each.id)
                for each in ast.walk(annotation)
            ):
                if unit not in TAKES_A_RESOURCE:
                    raise Unreadable(
                        f"{unit}: line {node.lineno}: a parameter of type Resource; declare here "
                        "what it is used for"
                    )

    def _use(self, unit: Unit, node: ast.AST, parent: ast.AST, resource: str) -> list[Right]:
        """Return the rights that a mention of a Resource needs."""
        match parent:
            case ast.Attribute(attr=field) if field in HARMLESS_FIELDS:
                return []
            case ast.Call(func=ast.Attribute(attr=method), args=[first, *_]) if (
                first is node and method in HARMLESS_CALLS
            ):
                return []
            case ast.Call(func=ast.Name(id=name), args=[_, second, *_]) if (
                second is node and name in FOLLOWERS
            ):
                return [Right(verb, resource) for verb in self._reflector_verbs()]
            case ast.Call(func=ast.Attribute(attr=method), args=[first, *_]) if (
                first is node and method in {*VERBS, "apply"}
            ):
                part = _subresource(unit, parent)
                return [Right(verb, resource + part) for verb in _verbs(method, part)]
        raise Unreadable(
            f"{unit}: the use of `{ast.unparse(node)}` cannot be determined from "
            f"`{ast.unparse(parent)}`"
        )

    def _reflector_verbs(self) -> tuple[str, ...]:
        """Return the verbs of a reflector, from its own calls."""
        found: set[str] = set()
        for node in self._nodes(Unit("fairlead.kube.reflector", "Reflector")):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr=method), args=[ast.Attribute(attr="_resource"), *_]
                ):
                    found |= set(VERBS[method])
        return tuple(sorted(found))

    def _module(self, name: str) -> Module:
        if name not in self._modules:
            self._modules[name] = Module(name, self._file(name).read_text())
        return self._modules[name]

    def _file(self, module: str) -> Path:
        path = self._root.joinpath(*module.split(".")[1:])
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _defines(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def _verbs(method: str, part: str) -> tuple[str, ...]:
    """Server-side apply creates an object that does not exist, and needs the right to do so, but
    not for subresources."""
    return (("patch",) if part else ("patch", "create")) if method == "apply" else VERBS[method]


def _subresource(unit: Unit, call: ast.Call) -> str:
    for keyword in call.keywords:
        if keyword.arg is None or (
            keyword.arg == "subresource" and not isinstance(keyword.value, ast.Constant)
        ):
            raise Unreadable(f"{unit}: line {call.lineno}: a subresource that is no constant")
        if keyword.arg == "subresource" and (name := ast.literal_eval(keyword.value)):
            return f"/{name}"
    return ""


def client_methods() -> set[str]:
    """Return the public methods of `Client`: each must be in VERBS, or be handled by name."""
    return {
        name
        for name, _ in inspect.getmembers(Client, inspect.isroutine)
        if not name.startswith("_")
    }
