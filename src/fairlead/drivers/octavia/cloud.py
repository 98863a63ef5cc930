"""Calls to Octavia's API, and to Neutron's; the only module that knows openstacksdk.

In: a path below /lbaas, or one of Neutron's after `network/`, what to send. Out: JSON as bytes, or
an error of ours that says what was tried, on what, and what was answered. openstacksdk finds the
cloud (clouds.yaml, the environment), gets tokens and renews them; it blocks, and so runs in threads
of its own. It takes most of a second to import, and is, when the first call is made. Invariant: no
call is ever repeated here. An answer that is lost may have been a yes: whoever called looks first.
A cloud gets no more calls in a second than its configuration allows."""

import asyncio
import re
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from fairlead.drivers.octavia.failures import Answer, neutron_error, of_region
from fairlead.drivers.octavia.paths import NETWORK, VERSIONS, url_of
from fairlead.errors import Conflict, FairleadError, Refused, Unavailable
from fairlead.sections import OctaviaConfig

MAX_CONCURRENT_CALLS = 8
TIMEOUT_S = 60.0
Params = Mapping[str, str | Sequence[str]]
"""What is asked after the `?`; of several values of a name any is good."""
BUSY = ("is immutable and cannot be updated", "Invalid state")
"""In the text of a 409: the load balancer is being worked on, or is in ERROR. There are 409s for
other things."""
QUOTA = "Quota has been met"
POLICY = "Policy does not allow"


WRONG_CREDENTIALS = "see that the credentials in clouds.yaml are valid"
NO_OCTAVIA = (
    "see that the region in clouds.yaml is right, and that the cloud's catalogue names "
    "a load-balancer service"
)
NO_RIGHT = "give the credentials a role that may have load balancers, as load-balancer_member"


class AccessDenied(Unavailable):
    """The cloud is not known by what clouds.yaml says, or does not know our credentials, or no
    longer."""


class Busy(Conflict):
    """Octavia is working on the load balancer, or cannot: look at it before anything else."""


class Failed(Unavailable):
    """Octavia took the request up, and could not carry it out. What it leaves behind may count
    against a quota."""


class Cloud:
    """One cloud, from its first call until `close`."""

    def __init__(self, config: OctaviaConfig) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT_CALLS, thread_name_prefix="octavia")
        self._connection: Any = None
        self._connecting = asyncio.Lock()
        self.creating = asyncio.Lock()
        """To be held while a load balancer is asked for. Octavia keeps a project's quotas locked
        until it has taken one in with all that is on it; of several at once all but one are in each
        other's way, and turned away after a minute."""
        most = max(int(config.calls_per_s), 1)
        self._window_s = most / config.calls_per_s
        self._turns_s: deque[float] = deque(maxlen=most)
        """When the last calls had their turn: as many as there may be within the window."""

    def close(self) -> None:
        """No call after this; none is waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._connection is not None:
            self._connection.close()

    @property
    def region(self) -> str:
        """Where it is, for people; empty: clouds.yaml does not say it, or nothing was called
        yet."""
        return _region(self._connection) if self._connection is not None else ""

    async def get(self, path: str, params: Params | None = None) -> bytes | None:
        """What is there; None if nothing is. Raises Unavailable or Refused."""
        answer = await self._ask("GET", path, params=params)
        if answer.status == 404:
            return None
        if answer.status >= 400:
            raise _error("GET", path, answer)
        return answer.body

    async def write(
        self, method: str, path: str, body: Mapping[str, object] | None, revision: int | None = None
    ) -> bytes:
        """Change something. Raises Busy, Conflict, Refused or Unavailable; after the last one it
        may have been done or not. `revision`: do it only if that is the state of it still; else
        Conflict (Neutron's alone)."""
        answer = await self._ask(method, path, body=body, revision=revision)
        if answer.status == 404 and method == "DELETE":
            return b""
        if answer.status >= 400:
            raise _error(method, path, answer)
        return answer.body

    async def _ask(
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
                self._connection = (
                    None  # the next call reads clouds.yaml, which may say something else by then
                )
                # lines that are at rest: calls of other threads end as they would
                connection.close()
            raise

    async def _turn(self) -> None:
        """Wait until the cloud may be called again. After quiet a second's worth of calls may come
        at once."""
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
    """What an answer that is no success means. 400 and 501 are the wish's fault, and so may 500 be;
    of others the cloud's."""
    said = _text(answer.body)
    message = f"{method} /lbaas/{path}: Octavia{answer.where} answered {answer.status}: {said}"
    match answer.status:
        case 409 if any(sign in said for sign in BUSY):
            return Busy(message)
        case 404:
            return Conflict(message)
        case 403 if QUOTA in said:
            return Unavailable(
                message, fix="raise the project's quota, or delete what nobody needs"
            )
        case 403 if POLICY in said:
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
    except msgspec.DecodeError:
        return body.decode(errors="replace").strip()[:200] or "nothing"


def _connect(config: OctaviaConfig) -> Any:
    """A connection by what the configuration names. Nothing is called yet. Raises NotLetIn."""
    try:
        import openstack.config
        import openstack.connection
    except ImportError as error:
        raise Unavailable(
            f"openstacksdk is not installed: {error}", fix="install fairlead[octavia]"
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
        _ = (
            connection.session
        )  # it closes the lines of that one alone, and of none before it was asked for
        return connection
    except (ClientException, SDKException) as error:
        fix = "see octavia.cloud in the configuration, and clouds.yaml"
        raise AccessDenied(
            f"the cloud {config.cloud!r} cannot be called: {error}", fix=fix
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
    """Made once: keystoneauth would repeat a call whose connection broke, even one that makes
    something. What it does repeat is a call that was turned away because its token had run out,
    with a new one."""
    from keystoneauth1.exceptions import ClientException, Unauthorized
    from openstack.exceptions import SDKException

    url = url_of(path)
    region = _region(connection)
    what = f"{method} {url}{of_region(region)}"
    try:
        if path == VERSIONS:
            # One level above all else; an API that has its own host and port is found there as well
            # as one below a path.
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
        raise AccessDenied(f"{what}: no token: {error}", fix=WRONG_CREDENTIALS) from error
    except ClientException as error:
        raise Unavailable(f"{what}: {error}") from error
    except SDKException as error:  # it found no Octavia, and would not look again
        raise AccessDenied(f"{what}: {error}", fix=NO_OCTAVIA) from error
    if response.status_code == 401:
        raise AccessDenied(f"{what}: {_text(response.content)}", fix=WRONG_CREDENTIALS)
    return Answer(
        response.status_code, response.content, response.headers.get("Retry-After", ""), region
    )
