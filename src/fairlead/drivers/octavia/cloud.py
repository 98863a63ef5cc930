"""Calls to Octavia's API; the only module that knows openstacksdk.

In: a path below /lbaas, what to send. Out: JSON as bytes, or an error of ours that says what was tried, on what, and what was
answered. openstacksdk finds the cloud (clouds.yaml, the environment), gets tokens and renews them; it blocks, and so runs in
threads of its own. It takes most of a second to import, and is, when the first call is made.
Invariant: no call is ever repeated here. An answer that is lost may have been a yes: whoever called looks first. A cloud gets
no more calls in a second than its configuration allows.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from fairlead.config import OctaviaConfig
from fairlead.errors import Conflict, FairleadError, Refused, Unavailable

MOST_CALLS_AT_ONCE = 8
ANSWERS_WITHIN_S = 60.0
BUSY = ("is immutable and cannot be updated", "Invalid state")
"""In the text of a 409: the load balancer is being worked on, or is in ERROR. There are 409s for other things."""
QUOTA = "Quota has been met"


class Answer(NamedTuple):
    status: int
    body: bytes
    retry_after: str


class Busy(Conflict):
    """Octavia is working on the load balancer, or cannot: look at it before anything else."""


class Cloud:
    """One cloud, from its first call until `close`."""

    def __init__(self, config: OctaviaConfig) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(MOST_CALLS_AT_ONCE, thread_name_prefix="octavia")
        self._connection: Any = None
        self._connecting = asyncio.Lock()
        self._next_s = 0.0

    def close(self) -> None:
        """No call after this; none is waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._connection is not None:
            self._connection.close()

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> bytes | None:
        """What is there; None if nothing is. Raises Unavailable or Refused."""
        answer = await self._ask("GET", path, params=params)
        if answer.status == 404:
            return None
        if answer.status >= 400:
            raise error_of("GET", path, answer)
        return answer.body

    async def write(self, method: str, path: str, body: Mapping[str, object] | None) -> bytes:
        """Change something. Raises Busy, Conflict, Refused or Unavailable; after the last one it may have been done or not."""
        answer = await self._ask(method, path, body=body)
        if answer.status == 404 and method == "DELETE":
            return b""
        if answer.status >= 400:
            raise error_of(method, path, answer)
        return answer.body

    async def _ask(
        self, method: str, path: str, *, params: Mapping[str, str] | None = None, body: Mapping[str, object] | None = None
    ) -> Answer:
        await self._turn()
        loop = asyncio.get_running_loop()
        async with self._connecting:
            if self._connection is None:
                self._connection = await loop.run_in_executor(self._threads, _connect, self._config)
        return await loop.run_in_executor(self._threads, _call, self._connection, method, path, params, body)

    async def _turn(self) -> None:
        """Wait until the cloud may be called again: calls keep their distance."""
        now_s = asyncio.get_running_loop().time()
        mine_s = max(self._next_s, now_s - 1.0)  # a second's worth of calls may come at once after quiet
        self._next_s = mine_s + 1.0 / self._config.calls_per_s
        if mine_s > now_s:
            await asyncio.sleep(mine_s - now_s)


def error_of(method: str, path: str, answer: Answer) -> FairleadError:
    """What an answer that is no success means. 400 and 501 are the wish's fault, and so may 500 be; of others the cloud's."""
    said = _text(answer.body)
    message = f"{method} /lbaas/{path}: Octavia answered {answer.status}: {said}"
    match answer.status:
        case 409 if any(sign in said for sign in BUSY):
            return Busy(message)
        case 404:
            return Conflict(message)
        case 403 if QUOTA in said:
            return Unavailable(message, fix="raise the project's quota, or delete what nobody needs")
        case 400 | 403 | 501:
            return Refused(message)
        case 401:
            return Unavailable(message, fix="see that the credentials in clouds.yaml are valid")
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
    """A connection by what the configuration names. Nothing is called yet. Raises Refused."""
    try:
        import openstack.config
        import openstack.connection
        import openstack.exceptions
    except ImportError as error:
        raise Unavailable(f"openstacksdk is not installed: {error}", fix="install fairlead[octavia]") from None
    files = [config.clouds_file] if config.clouds_file else None
    try:
        found = openstack.config.OpenStackConfig(config_files=files, load_envvars=not files, app_name="fairlead")
        return openstack.connection.Connection(config=found.get_one(cloud=config.cloud or None))
    except openstack.exceptions.ConfigException as error:
        raise Unavailable(
            f"the cloud {config.cloud!r} is not known: {error}", fix="see octavia.cloud and clouds.yaml"
        ) from error


def _call(
    connection: Any, method: str, path: str, params: Mapping[str, str] | None, body: Mapping[str, object] | None
) -> Answer:
    """Made once: keystoneauth would repeat a call whose connection broke, even one that makes something."""
    from keystoneauth1.exceptions import ClientException
    from openstack.exceptions import SDKException

    try:
        response = connection.load_balancer.request(
            f"/lbaas/{path}",
            method,
            params=params,
            json=body,
            raise_exc=False,
            connect_retries=0,
            status_code_retries=0,
            timeout=ANSWERS_WITHIN_S,
        )
    except (ClientException, SDKException) as error:
        raise Unavailable(f"{method} /lbaas/{path}: {error}") from error
    return Answer(response.status_code, response.content, response.headers.get("Retry-After", ""))
