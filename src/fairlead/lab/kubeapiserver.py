"""A real kube-apiserver with its etcd, for labs and tests: RBAC is on, and all files are below one
directory.

In: a directory, an address, the cluster's ClusterIP ranges, and optionally a network namespace.
Out: two processes, an `Access` with all rights, tokens of service accounts. The programs come from
envtest's folder, the PATH or `make tools`. Invariants: the processes carry the marks of `process`,
so leftovers are found; deleting the directory deletes all data (etcd runs without fsync).

There is no controller manager: namespaces stay Terminating and ownerReferences are not followed. No
ServiceAccount is created for Pods, so the ServiceAccount admission plug-in is off.
"""

import asyncio
import os
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from http.client import HTTPException, HTTPSConnection
from pathlib import Path

import msgspec

from fairlead.errors import Refused, Unavailable
from fairlead.kube.access import Access, Credentials, tls_context
from fairlead.kube.client import Client
from fairlead.lab import namespace, process
from fairlead.lab.ports import free_ports
from fairlead.lab.process import Process

ASSETS = "KUBEBUILDER_ASSETS"
"""The folder of the test binaries, by the convention of controller-runtime's envtest."""
LABEL = "lab/kube-apiserver"
ETCD_LABEL = "lab/etcd"
START_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 5.0
POLL_S = 0.1
SERVER_NAME = "kubernetes"
"""A name that every self-signed certificate of the server contains, whatever its address."""
ADMISSION_OFF = "ServiceAccount"


def find_program(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of `kube-apiserver`, `kube-proxy` or `etcd`: from $KUBEBUILDER_ASSETS, else
    the PATH, else the cache that `make tools` fills. Raise Refused with the searched places."""
    cache = Path(
        environment.get("XDG_CACHE_HOME")
        or Path(environment.get("HOME", "~")).expanduser() / ".cache"
    )
    places = [Path(environment[ASSETS])] if environment.get(ASSETS) else []
    places += [
        Path(folder) for folder in environment.get("PATH", os.defpath).split(os.pathsep) if folder
    ]
    places.append(cache / "fairlead" / "bin")
    for place in places:
        if os.access(place / name, os.X_OK):
            return place / name
    raise Refused(
        f"{name} is neither in ${ASSETS}, nor on the PATH, nor in {places[-1]}",
        fix="run `make tools`: it builds Kubernetes' programs and etcd from their Go modules, once",
    )


class KubeApiServer:
    """An API server. `up` starts it and `down` ends it; between the two, server and etcd may be
    killed and started separately."""

    def __init__(
        self,
        directory: Path,
        *,
        lab: str,
        service_cidrs: Sequence[str] = ("10.96.0.0/16", "2001:db8:96::/112"),
        inside: str | None = None,
        address: str = "127.0.0.1",
        port: int = 0,
        audit: bool = False,
        node_ports: str = "30000-32767",
        etcd: Path | None = None,
    ) -> None:
        """Configure a server without starting it.

        `lab` marks its processes. `inside` is the network namespace it runs in, with `address` in
        that namespace; None is the machine's own namespace. `port` 0 takes a free port. `audit`
        writes requests (Metadata level) to `audit_log`. `node_ports` is `first-last`, the range of
        nodePorts and healthCheckNodePorts. `etcd` is the program to run; None uses the result of
        `find_program`.
        """
        self.directory = directory
        self.audit_log = directory / "audit.log"
        self._lab = lab
        self._cidrs = service_cidrs
        self._inside = inside
        self._address = address
        self._port = port
        self._etcd_port = 0
        self._audit = audit
        self._node_ports = node_ports
        self._etcd_program = etcd
        self._token = secrets.token_urlsafe()
        self._log = directory / "kube-apiserver.log"
        self.server: Process | None = None
        self.etcd: Process | None = None

    async def __aenter__(self) -> "KubeApiServer":
        await self.up()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.down()

    @property
    def url(self) -> str:
        return f"https://{self._address}:{self._port}"

    @property
    def access(self) -> Access:
        """Access with all rights (group system:masters). Available once the server is up."""
        authority = (self.directory / "certificates" / "apiserver.crt").read_text()
        return Access(
            self.url,
            authority_pem=authority,
            server_name=SERVER_NAME,
            token=self._token,
            source="the real API server",
        )

    async def up(self) -> None:
        """Start both processes and return once the server is ready. Raise Refused when a program is
        missing, and Unavailable with the end of the logs when a process exits or does not become
        ready in time; both processes are then ended."""
        programs = self._etcd_program or find_program("etcd"), find_program("kube-apiserver")
        self.directory.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(self._make_keys)
        with namespace.inside(self._inside) if self._inside else nullcontext():
            self._etcd_port, free = free_ports(2)
        self._port = self._port or free
        try:
            self.start_etcd(programs[0])
            await self.start_server(programs[1])
        except BaseException:
            await self.down()
            raise

    async def down(self) -> None:
        """Kill both processes. Idempotent."""
        await process.kill_all([each for each in (self.server, self.etcd) if each is not None])
        self.server = self.etcd = None

    def replica(self, port: int) -> "KubeApiServer":
        """Return another API server of the same cluster, on the same etcd, which must be up. Only
        `start_server` and `down` may be called on it."""
        other = KubeApiServer(
            self.directory,
            lab=self._lab,
            service_cidrs=self._cidrs,
            inside=self._inside,
            address=self._address,
            port=port,
            node_ports=self._node_ports,
        )
        other._etcd_port, other._token = self._etcd_port, self._token
        other._log = self.directory / f"kube-apiserver-{port}.log"
        return other

    def start_etcd(self, program: Path | None = None) -> None:
        """Start etcd with the data of the previous etcd, if there was one."""
        here = f"http://127.0.0.1:{self._etcd_port}"
        argv = [
            str(program or self._etcd_program or find_program("etcd")),
            f"--data-dir={self.etcd_data}",
            f"--listen-client-urls={here}",
            f"--advertise-client-urls={here}",
            "--listen-peer-urls=http://127.0.0.1:0",
            "--logger=zap",
            "--unsafe-no-fsync",
            f"--quota-backend-bytes={4 << 30}",
        ]
        self.etcd = process.spawn(
            self._lab, ETCD_LABEL, argv, log=self.directory / "etcd.log", inside=self._inside
        )

    @property
    def etcd_data(self) -> Path:
        """The data directory of etcd."""
        return self.directory / "etcd"

    @property
    def etcd_url(self) -> str:
        """The client URL of etcd, for `etcdctl`."""
        return f"http://127.0.0.1:{self._etcd_port}"

    async def start_server(self, program: Path | None = None) -> None:
        """Start kube-apiserver and return once it is ready."""
        argv = [str(program or find_program("kube-apiserver")), *self._flags()]
        self.server = process.spawn(self._lab, LABEL, argv, log=self._log, inside=self._inside)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await asyncio.to_thread(self._ready):
                    for part in (self.server, self.etcd):
                        if part is not None and not part.running:
                            raise Unavailable(
                                f"{part.label} exited at startup; end of the "
                                f"logs:\n{self._log_tails()}"
                            )
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            late = (
                f"{LABEL} was not ready within {START_TIMEOUT_S:.0f} s; end of the "
                f"logs:\n{self._log_tails()}"
            )
            raise Unavailable(late) from None

    async def service_account_token(self, account: str, *, valid_s: int = 86400) -> str:
        """Return a token of an existing ServiceAccount. Needs a server in the machine's own network
        namespace."""
        async with Client(self.access) as client:
            return await service_account_token(client, account, valid_s=valid_s)

    def _ready(self) -> bool:
        """Return whether the server answers /readyz with 200. Blocks: run it in a thread, because
        entering a namespace changes the calling thread."""
        with (
            namespace.inside(self._inside) if self._inside else nullcontext(),
            suppress(OSError, HTTPException),
        ):
            trust = tls_context(self.access, Credentials())
            connection = HTTPSConnection(
                self._address, self._port, timeout=READY_TIMEOUT_S, context=trust
            )
            headers = {"Authorization": f"Bearer {self._token}"}
            try:
                connection.request("GET", "/readyz", headers=headers)
                return connection.getresponse().status == 200
            finally:
                connection.close()
        return False

    def _make_keys(self) -> None:
        """Create a CA for client certificates, a key pair for service account tokens, and the
        administrator's token, unless they exist."""
        tokens = self.directory / "tokens.csv"
        if tokens.exists():
            self._token = tokens.read_text().partition(",")[0]
            return
        curve = "ec_paramgen_curve:prime256v1"
        _openssl(
            *(
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                curve,
                "-nodes",
                "-days",
                "3650",
                "-subj",
                "/CN=fairlead-lab",
            ),
            *("-keyout", str(self.directory / "ca.key"), "-out", str(self.directory / "ca.crt")),
        )
        _openssl(
            "genpkey",
            "-algorithm",
            "EC",
            "-pkeyopt",
            curve,
            "-out",
            str(self.directory / "accounts.key"),
        )
        _openssl(
            "pkey",
            "-in",
            str(self.directory / "accounts.key"),
            "-pubout",
            "-out",
            str(self.directory / "accounts.pub"),
        )
        tokens.touch(mode=0o600)
        tokens.write_text(f'{self._token},admin,admin,"system:masters"\n')

    def _flags(self) -> list[str]:
        within = self.directory
        flags = {
            "etcd-servers": self.etcd_url,
            "bind-address": self._address,
            "secure-port": str(self._port),
            # Used only for the endpoints of the `kubernetes` Service, which are not reconciled
            # here. The server rejects a loopback address.
            "advertise-address": "192.0.2.1" if self._address.startswith("127.") else self._address,
            "endpoint-reconciler-type": "none",
            "cert-dir": str(within / "certificates"),
            "client-ca-file": str(within / "ca.crt"),
            "token-auth-file": str(within / "tokens.csv"),
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": str(within / "accounts.pub"),
            "service-account-signing-key-file": str(within / "accounts.key"),
            "service-cluster-ip-range": ",".join(self._cidrs),
            "service-node-port-range": self._node_ports,
            "authorization-mode": "Node,RBAC",
            "disable-admission-plugins": ADMISSION_OFF,
            "allow-privileged": "true",
            "profiling": "false",
        }
        if self._audit:
            policy = within / "audit.yaml"
            policy.write_text(
                "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: "
                "[RequestReceived]\nrules: [{level: Metadata}]\n"
            )
            flags |= {
                "audit-policy-file": str(policy),
                "audit-log-path": str(self.audit_log),
                "audit-log-mode": "blocking",
            }
        return [f"--{name}={value}" for name, value in flags.items()]

    def _log_tails(self, lines: int = 12) -> str:
        tails = []
        for log in (self.directory / "etcd.log", self._log):
            with suppress(FileNotFoundError):
                tails += [f"{log.name}:", *log.read_text(errors="replace").splitlines()[-lines:]]
        return "\n".join(tails)


async def service_account_token(client: Client, account: str, *, valid_s: int = 86400) -> str:
    """Return a token of an existing ServiceAccount, `namespace/name`, from the TokenRequest API."""
    space, name = account.split("/")
    path = f"/api/v1/namespaces/{space}/serviceaccounts/{name}/token"
    answer = await client.request("POST", path, body={"spec": {"expirationSeconds": valid_s}})
    return str(msgspec.json.decode(answer)["status"]["token"])


def _openssl(*arguments: str) -> None:
    try:
        subprocess.run(
            ["openssl", *arguments], check=True, capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        raise Refused(
            "openssl is not installed: it creates the keys of a real API server",
            fix="run `make setup`",
        ) from None
    except subprocess.CalledProcessError as problem:
        raise Unavailable(
            f"openssl {arguments[0]} failed: {problem.stderr.strip()[-300:]}"
        ) from problem
