"""Check the syntax of names, labels and addresses, with the messages of the API server. Pure.

In: a string. Out: the errors, each as the message that kubectl prints; empty if it is valid.
Follows RFC 1123 and k8s.io/apimachinery util/validation.
"""

import ipaddress
import re
from typing import Final

_LABEL: Final = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN: Final = rf"{_LABEL}(\.{_LABEL})*"
_QUALIFIED: Final = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_LABEL_VALUE: Final = "(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?"


def _no_match(what: str, example: str, pattern: str, *more: str) -> str:
    examples = " or ".join(f"'{text}'" for text in (f"{example}", *more))
    return (
        f"{what} (e.g. {examples.replace(' or ', ',  or ')}, regex used for validation is "
        f"'{pattern}')"
    )


def _too_long(limit: int) -> str:
    return f"must be no more than {limit} characters"


def dns_label(text: str) -> list[str]:
    problems = [_too_long(63)] if len(text) > 63 else []
    if not re.fullmatch(_LABEL, text):
        what = (
            "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', "
            "and must start and end with an alphanumeric character"
        )
        problems.append(_no_match(what, "my-name", _LABEL, "123-abc"))
    return problems


def dns_subdomain(text: str) -> list[str]:
    problems = [_too_long(253)] if len(text) > 253 else []
    if not re.fullmatch(_SUBDOMAIN, text):
        what = (
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, "
            "'-' or '.', "
            "and must start and end with an alphanumeric character"
        )
        problems.append(_no_match(what, "example.com", _SUBDOMAIN))
    return problems


def qualified_name(text: str) -> list[str]:
    """Check `name` or `prefix/name`, the syntax of label and annotation keys, finalizers and
    classes."""
    prefix, slash, name = text.rpartition("/")
    if prefix.count("/") or (slash and not prefix):
        return ["prefix part must be non-empty"] if slash and not prefix else [_bad_qualified()]
    problems = [f"prefix part {problem}" for problem in dns_subdomain(prefix)] if prefix else []
    if not name:
        return [*problems, "name part must be non-empty", _bad_qualified("name part ")]
    if len(name) > 63:
        problems.append(f"name part {_too_long(63)}")
    if not re.fullmatch(_QUALIFIED, name):
        problems.append(_bad_qualified("name part "))
    return problems


def _bad_qualified(part: str = "") -> str:
    what = (
        f"{part or 'a qualified name '}must consist of alphanumeric characters, '-', '_' or '.', "
        "and must start and end with an alphanumeric character"
    )
    message = _no_match(what, "MyName", _QUALIFIED, "my.name", "123-abc")
    return (
        message
        if part
        else f"{message} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
    )


def label_value(text: str) -> list[str]:
    problems = [_too_long(63)] if len(text) > 63 else []
    if not re.fullmatch(_LABEL_VALUE, text):
        what = (
            "a valid label must be an empty string or consist of alphanumeric characters, '-', "
            "'_' or '.', "
            "and must start and end with an alphanumeric character"
        )
        problems.append(_no_match(what, "MyValue", _LABEL_VALUE, "my_value", "12345"))
    return problems


def port_number(number: int) -> list[str]:
    return [] if 1 <= number <= 65535 else ["must be between 1 and 65535, inclusive"]


def port_name(text: str) -> list[str]:
    """Check an RFC 6335 service name, the syntax of a named targetPort or container port."""
    problems = []
    if len(text) > 15:
        problems.append("must be no more than 15 characters")
    if not re.fullmatch("[-a-z0-9]+", text):
        problems.append("must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)")
    if not re.search("[a-z]", text):
        problems.append("must contain at least one letter (a-z)")
    if "--" in text:
        problems.append("must not contain consecutive hyphens")
    if text.startswith("-") or text.endswith("-"):
        problems.append("must not begin or end with a hyphen")
    return problems


def dns_label_name(text: str) -> list[str]:
    """Check an object's name as `dns_label` does, but report dots first, and alone: they are the
    most common mistake."""
    return ["must not contain dots"] if "." in text else dns_label(text)


_ADDRESS: Final = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"
_CIDR: Final = "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)"


_LEADING_ZERO: Final = re.compile(r"0+\d+")


def address(text: str) -> list[str]:
    """Check an IP address. Leading zeros, which some programs read as octal, have a message of
    their own."""
    if (found := parse_address(text)) is not None:
        return ["must not be an IPv4-mapped IPv6 address"] if is_mapped(found) else []
    parts = text.split(".")
    if len(parts) == 4 and any(_LEADING_ZERO.fullmatch(part) for part in parts):
        bare = ".".join(part.lstrip("0") or "0" for part in parts)
        return ["must not have leading 0s"] if parse_address(bare) else [_ADDRESS]
    return [_ADDRESS]


def parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address, or None if it is invalid. Leading zeros and zones are invalid, as in the
    API for new values."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    return None if "%" in text else found


def is_mapped(found: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether an address is an IPv4-mapped IPv6 address, which the API refuses in new
    values."""
    return isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None


def cidr(text: str) -> list[str]:
    """Check a CIDR. Leading zeros, IPv4-mapped addresses and host bits have messages of their
    own."""
    base, slash, length = text.partition("/")
    parsed = parse_address(base)
    mapped = parsed is not None and is_mapped(parsed)
    problems = [] if mapped else address(base)
    limit = 128 if ":" in base else 32
    if (
        not slash
        or problems == [_ADDRESS]
        or not re.fullmatch("[0-9]+", length)
        or int(length) > limit
    ):
        return [_CIDR]
    if problems or length != str(int(length)):
        return ["must not have leading 0s in IP or prefix length"]
    if mapped:
        return ["must not have an IPv4-mapped IPv6 address"]
    network = ipaddress.ip_network(text, strict=False)
    return (
        []
        if str(network.network_address) == str(parse_address(base))
        else ["must not have bits set beyond the prefix length"]
    )


def special_address(text: str) -> list[str]:
    """Return the reasons why an address cannot be an externalIP; empty if it can."""
    found = ipaddress.ip_address(text)
    if found.is_unspecified:
        return [f"may not be unspecified ({text})"]
    if found.is_loopback:
        return ["may not be in the loopback range (127.0.0.0/8, ::1/128)"]
    if found.is_link_local:
        return ["may not be in the link-local range (169.254.0.0/16, fe80::/10)"]
    multicast = ipaddress.ip_network(
        "224.0.0.0/24" if found.version == 4 else "ff02::/10", strict=False
    )
    if found in multicast:
        return ["may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)"]
    return []


def family_of(text: str) -> str:
    return "IPv6" if ":" in text else "IPv4"
