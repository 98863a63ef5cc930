"""Use pyroute2's rtnetlink, with its errors mapped to Fairlead's.

In: a description of the operation. Out: a connection in the network namespace of the caller.
pyroute2 is loaded on first use: that takes a tenth of a second, and most nodes never need it."""

import errno
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fairlead.errors import Refused, Unavailable

_RIGHTS = "run as root, or with CAP_NET_ADMIN"
_FIXES = {errno.EPERM: _RIGHTS, errno.EACCES: _RIGHTS}


@asynccontextmanager
async def open_iproute(tried: str, fixes: Mapping[int, str] | None = None) -> AsyncIterator[Any]:
    """Provide a connection.

    Raise Refused if permissions are missing, or for an error number that has an entry in `fixes`;
    otherwise raise Unavailable."""
    from pyroute2 import AsyncIPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        async with AsyncIPRoute() as route:
            yield route
    except NetlinkError as error:
        message = f"{tried}: {error.args[1] if len(error.args) > 1 else error}"
        if fix := (_FIXES | dict(fixes or {})).get(error.code):
            raise Refused(message, fix=fix) from error
        raise Unavailable(message) from error
