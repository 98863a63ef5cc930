"""A mypy plugin: messages must not contain Python's representation of a value.

In: each value in an f-string of the package, with its type. Out: an error where `str` of it would
be a representation for programmers, such as "('a', 'b')", "None", "b'x'" or "Service(name='web')".
Strings, numbers, and classes that define `__str__`, such as addresses, are allowed; `!r` is allowed
for strings, which it quotes. Exceptions of Python and of libraries are allowed neither in an
f-string nor in `str(...)`: `fairlead.errors.plain` words them. Exceptions of the package, and
ValueError, which its functions raise with a text for users, are allowed. Values of type Any are not
checked."""

from collections.abc import Callable, Iterator

from mypy.errorcodes import ErrorCode
from mypy.nodes import CallExpr, MemberExpr, StrExpr
from mypy.plugin import FunctionContext, MethodContext, Plugin
from mypy.types import (
    Instance,
    LiteralType,
    NoneType,
    ProperType,
    TupleType,
    Type,
    TypeVarType,
    UnionType,
    get_proper_type,
)

UNREADABLE = ErrorCode("unreadable", "A text has Python's representation of a value", "General")
PACKAGE = "src/fairlead/"
EXCEPTION = "builtins.BaseException"
OWN = "fairlead."
WORDED = "builtins.ValueError"
WORDING = ("src/fairlead/errors.py", "src/fairlead/mistakes.py")
"""The modules whose functions word exceptions."""
READABLE = {
    *("builtins.str", "builtins.int", "builtins.float", "builtins.bool"),
    *("pathlib.PurePath", "ipaddress._BaseV4", "ipaddress._BaseV6", "uuid.UUID", "decimal.Decimal"),
}
"""Classes whose `str` is text, although typeshed does not always declare it."""
ALWAYS_SET = {"strerror"}
"""Attributes that are never None here. `OSError.strerror` is None only if no system call failed,
and no such OSError is caught here."""


class ReadablePlugin(Plugin):
    """Checks the values in f-strings, which mypy reads as `"{:{}}".format(value, "")`, and the
    exceptions in calls of `str`."""

    def get_function_hook(self, fullname: str) -> Callable[[FunctionContext], Type] | None:
        return check_exception if fullname == "builtins.str" else None

    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        return check if fullname == "builtins.str.format" else None


def check_exception(context: FunctionContext) -> Type:
    path = getattr(context.api, "path", "").replace("\\", "/")
    if PACKAGE in path and not path.endswith(WORDING):
        for shown in context.arg_types[0][:1] if context.arg_types else ():
            if wrong := sorted(set(_raw_exceptions(get_proper_type(shown)))):
                context.api.fail(
                    f"a text contains {' or '.join(wrong)} as it is: use `plain`",
                    context.context,
                    code=UNREADABLE,
                )
    return context.default_return_type


def _raw_exceptions(shown: ProperType) -> Iterator[str]:
    """Yield the types of exceptions whose text is not meant for users."""
    match shown:
        case UnionType(items=items):
            for item in items:
                yield from _raw_exceptions(get_proper_type(item))
        case Instance(type=info):
            exception = any(base.fullname == EXCEPTION for base in info.mro)
            if exception and info.fullname != WORDED and not info.fullname.startswith(OWN):
                yield info.name


def check(context: MethodContext) -> Type:
    call = context.context
    inside = PACKAGE in getattr(context.api, "path", "").replace("\\", "/")
    if (
        inside
        and isinstance(call, CallExpr)
        and isinstance(call.callee, MemberExpr)
        and isinstance(call.callee.expr, StrExpr)
    ):
        quoted = "!r" in call.callee.expr.value
        value = call.args[0] if call.args else None
        known = isinstance(value, MemberExpr) and value.name in ALWAYS_SET
        for shown in context.arg_types[0][:1] if context.arg_types and not known else ():
            if wrong := sorted(set(_unreadable(get_proper_type(shown), quoted=quoted))):
                context.api.fail(
                    f"a text contains Python's representation of {' or '.join(wrong)}",
                    call,
                    code=UNREADABLE,
                )
    return context.default_return_type


def _unreadable(shown: ProperType, *, quoted: bool) -> Iterator[str]:
    """Yield the types of the value whose `str` is not meant for users."""
    match shown:
        case UnionType(items=items):
            for item in items:
                yield from _unreadable(get_proper_type(item), quoted=quoted)
        case NoneType():
            yield "None"
        case TypeVarType(upper_bound=bound):
            yield from _unreadable(get_proper_type(bound), quoted=quoted)
        case LiteralType(fallback=fallback):
            yield from _unreadable(fallback, quoted=quoted)
        case TupleType(partial_fallback=fallback):
            yield from _unreadable(fallback, quoted=quoted)
        case Instance(type=info):
            readable = _has_text(shown) or any(base.fullname in READABLE for base in info.mro)
            if (
                any(_raw_exceptions(shown))
                or not readable
                or (quoted and info.fullname != "builtins.str")
            ):
                yield info.name


def _has_text(shown: Instance) -> bool:
    """Whether the class, or a base class other than `object`, defines `__str__`."""
    return any(
        "__str__" in base.names for base in shown.type.mro if base.fullname != "builtins.object"
    )


def plugin(version: str) -> type[Plugin]:
    """The entry point for mypy."""
    return ReadablePlugin
