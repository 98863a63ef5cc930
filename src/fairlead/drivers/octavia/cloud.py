"""Calls to the APIs of Octavia and Neutron. No other module uses openstacksdk.

In: a path below /lbaas, or a path of Neutron after `network/`, and a body. Out: JSON as bytes, or a
FairleadError with the request, its object and the answer. openstacksdk finds the cloud
(clouds.yaml, the environment), and gets and renews tokens. It blocks, and therefore runs in threads
of its own. Its import takes most of a second, and is deferred to the first call. Invariants: no
call is repeated here, because a request whose answer was lost may have succeeded; the caller reads
first. A cloud gets at most `calls_per_s` calls per second."""

import asyncio
import re
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from fairlead.drivers.octavia.failures import UNDECODABLE, Answer, neutron_error, of_region
from fairlead.drivers.octavia.paths import NETWORK, VERSIONS, url_of
from fairlead.errors import Conflict, FairleadError, Refused, Unavailable, plain
from fairlead.sections import OctaviaConfig

MAX_CONCURRENT_CALLS = 8
TIMEOUT_S = 60.0
Params = Mapping[str, str | Sequence[str]]
"""The query parameters. Of several values for a name, any may match."""
BUSY = ("is immutable and cannot be updated", "Invalid state")
"""Texts of a 409 which mean that Octavia is working on the load balancer, or that it is in ERROR. A
409 can have other reasons."""
QUOTA = "Quota has been met"
POLICY = "Policy does not allow"


WRONG_CREDENTIALS = "check the credentials in clouds.yaml"
NO_OCTAVIA = (
    "check the region in clouds.yaml, and that the cloud's service catalogue has a "
    "load-balancer service"
)
NO_RIGHT = "give the credentials a role that may manage load balancers, as load-balancer_member"


class AccessDenied(Unavailable):
    """clouds.yaml does not describe a usable cloud, or the cloud rejects the credentials."""


class Busy(Conflict):
    """Octavia is working on the load balancer, or cannot change it. Read its state before another
    write."""


class Failed(Unavailable):
    """Octavia accepted the request and could not carry it out. Objects that it leaves behind may
    count against a quota."""


class Cloud:
    """The connection to one cloud, from the first call until `close`."""

    def __init__(self, config: OctaviaConfig) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT_CALLS, thread_name_prefix="octavia")
        self._connection: Any = None
        self._connecting = asyncio.Lock()
        self.creating = asyncio.Lock()
        """Held while a load balancer is created. Octavia keeps a project's quotas locked until it
        has accepted a load balancer with everything below it. Concurrent creations would block each
        other, and all but one would be rejected after a minute."""
        max_calls = max(int(config.calls_per_s), 1)
        self._window_s = max_calls / config.calls_per_s
        self._turns_s: deque[float] = deque(maxlen=max_calls)
        """The start times of the last calls, as many as are allowed within the window."""

    def close(self) -> None:
        """Close the connection without waiting for calls. No call may follow."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._connection is not None:
            self._connection.close()

    @property
    def region(self) -> str:
        """The region of the cloud, for messages; empty if clouds.yaml does not set it, or before
        the first call."""
        return _region(self._connection) if self._connection is not None else ""

    async def get(self, path: str, params: Params | None = None) -> bytes | None:
        """Return the body of the answer, or None for a 404. Raise Unavailable or Refused."""
        answer = await self._request("GET", path, params=params)
        if answer.status == 404:
            return None
        if answer.status >= 400:
            raise _error("GET", path, answer)
        return answer.body

    async def write(
        self, method: str, path: str, body: Mapping[str, object] | None, revision: int | None = None
    ) -> bytes:
        """Make a write, and return the body of the answer. With `revision` the write is made only
        if the object still has that revision (Neutron only), else Conflict. Raise Busy, Conflict,
        Refused or Unavailable; after Unavailable the write may or may not have been made."""
        answer = await self._request(method, path, body=body, revision=revision)
        if answer.status == 404 and method == "DELETE":
            return b""
        if answer.status >= 400:
            raise _error(method, path, answer)
        return answer.body

    async def _request(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        body: Mapping[str, object] | None = None,
        revision: int | None = None,
    ) -> Answer:
        await self._turn()
        loop = asyncio.get_running_loop()
        async with self._connecting:
            if self._connection is None:
                self._connection = await loop.run_in_executor(self._threads, _connect, self._config)
        connection = self._connection
        try:
            return await loop.run_in_executor(
                self._threads, _call, connection, method, path, params, body, revision
            )
        except AccessDenied:
            if self._connection is connection:
                self._connection = None  # the next call reads clouds.yaml, which may have changed
                # This closes idle connections only; calls of other threads finish.
                connection.close()
            raise

    async def _turn(self) -> None:
        """Wait until the rate limit allows a call. After a quiet second, a second's worth of calls
        may start at once."""
        now_s = mine_s = asyncio.get_running_loop().time()
        if len(self._turns_s) == self._turns_s.maxlen:
            mine_s = max(now_s, self._turns_s[0] + self._window_s)
        self._turns_s.append(mine_s)
        if mine_s > now_s:
            await asyncio.sleep(mine_s - now_s)


def _error(method: str, path: str, answer: Answer) -> FairleadError:
    if path.startswith(NETWORK):
        return neutron_error(method, path.removeprefix(NETWORK), answer)
    return error_of(method, path, answer)


def error_of(method: str, path: str, answer: Answer) -> FairleadError:
    """Return the error for an answer with an error status. 400 and 501 mean that the request is
    wrong, and 500 may mean this; other statuses are problems of the cloud."""
    text = _text(answer.body)
    message = f"{method} /lbaas/{path}: Octavia{answer.where} answered {answer.status}: {text}"
    match answer.status:
        case 409 if any(sign in text for sign in BUSY):
            return Busy(message)
        case 404:
            return Conflict(message)
        case 403 if QUOTA in text:
            return Unavailable(message, fix="raise the project's quota, or delete unused objects")
        case 403 if POLICY in text:
            return Refused(message, fix=NO_RIGHT)
        case 400 | 403 | 501:
            return Refused(message)
        case 500:
            return Failed(message)
    seconds = float(answer.retry_after) if answer.retry_after.isdecimal() else 0.0
    return Unavailable(message, retry_after_s=seconds)


class _Fault(msgspec.Struct):
    faultstring: str = ""


def _text(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Fault).faultstring or "nothing"
    except UNDECODABLE:
        return body.decode(errors="replace").strip()[:200] or "nothing"


def _connect(config: OctaviaConfig) -> Any:
    """Return a connection to the configured cloud. No call is made yet. Raise AccessDenied."""
    try:
        import openstack.config
        import openstack.connection
    except ImportError as error:
        raise Unavailable(
            f"openstacksdk is not installed: {plain(error)}", fix="install fairlead[octavia]"
        ) from None
    from keystoneauth1.exceptions import ClientException
    from openstack.exceptions import SDKException

    files = [config.clouds_file] if config.clouds_file else None
    try:
        found = openstack.config.OpenStackConfig(
            config_files=files, load_envvars=not files, app_name="fairlead"
        )
        connection = openstack.connection.Connection(
            config=found.get_one(cloud=config.cloud or None)
        )
        # `close` of the connection closes its session only if the session exists.
        _ = connection.session
        return connection
    except (ClientException, SDKException) as error:
        fix = "check octavia.cloud in the configuration, and clouds.yaml"
        raise AccessDenied(
            f"the cloud {config.cloud!r} cannot be called: {plain(error)}", fix=fix
        ) from error


def _region(connection: Any) -> str:
    return str(connection.config.get_region_name() or "")


def _call(
    connection: Any,
    method: str,
    path: str,
    params: Params | None,
    body: Mapping[str, object] | None,
    revision: int | None,
) -> Answer:
    """Make one call. keystoneauth's retries are disabled, because it would repeat a call whose
    connection broke, even a call that creates an object. It still repeats a call with a new token
    if the call was rejected because the token had expired."""
    from keystoneauth1.exceptions import ClientException, Unauthorized
    from openstack.exceptions import SDKException

    url = url_of(path)
    region = _region(connection)
    what = f"{method} {url}{of_region(region)}"
    try:
        if path == VERSIONS:
            # The versions are listed one level above the versioned endpoint. This holds both for an
            # API below a path and for an API with a host and port of its own.
            url = re.sub(r"/v2(\.\d+)?/?$", "", connection.load_balancer.get_endpoint() or "") + "/"
        response = (
            connection.network if path.startswith(NETWORK) else connection.load_balancer
        ).request(
            url,
            method,
            headers={} if revision is None else {"If-Match": f"revision_number={revision}"},
            params=params,
            json=body,
            raise_exc=False,
            connect_retries=0,
            status_code_retries=0,
            timeout=TIMEOUT_S,
        )
    except Unauthorized as error:
        raise AccessDenied(f"{what}: no token: {plain(error)}", fix=WRONG_CREDENTIALS) from error
    except ClientException as error:
        raise Unavailable(f"{what}: {plain(error)}") from error
    # The connection found no Octavia endpoint, and caches this result.
    except SDKException as error:
        raise AccessDenied(f"{what}: {plain(error)}", fix=NO_OCTAVIA) from error
    if response.status_code == 401:
        raise AccessDenied(f"{what}: {_text(response.content)}", fix=WRONG_CREDENTIALS)
    return Answer(
        response.status_code, response.content, response.headers.get("Retry-After", ""), region
    )
