"""Read and write the kernel's settings of the calling thread's network namespace.

In: names as sysctl(8) has them, with slashes ("net/ipv4/conf/eth0/rp_filter"), because names of
interfaces may have dots. Out: values as text. A setting that this kernel does not have reads as
None. Follows proc_sys(5)."""

from pathlib import Path

from fairlead.errors import Conflict, Refused, Unavailable

ROOT = Path("/proc/sys")


def read(name: str) -> str | None:
    """The value, without the line's end; None where there is no such setting, or no such
    interface."""
    try:
        return (ROOT / name).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unavailable(f"reading {ROOT / name}: {error.strerror}") from error


def write(name: str, value: str) -> None:
    """Set it. Raises Conflict where it is not there, Refused where it is read-only, as in most
    containers."""
    try:
        (ROOT / name).write_text(value, encoding="ascii")
    except FileNotFoundError as error:
        raise Conflict(f"there is no setting {ROOT / name}") from error
    except OSError as error:
        fix = f"set it from outside: {command(name, value)}"
        raise Refused(f"writing {value} to {ROOT / name}: {error.strerror}", fix=fix) from error


def command(name: str, value: str) -> str:
    """What somebody would type to set it."""
    return f"sysctl -w {name}={value}"
