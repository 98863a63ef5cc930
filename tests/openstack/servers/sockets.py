"""Where a provider finds the driver agent: in the directory of its Octavia, and not in the one that
upstream's code names."""

from pathlib import Path

from octavia_lib.api.drivers import driver_lib


def are_in(directory: Path) -> None:
    names = ("status", "stats", "get")
    driver_lib.DriverLibrary.__init__.__defaults__ = tuple(
        str(directory / f"{name}.sock") for name in names
    )
