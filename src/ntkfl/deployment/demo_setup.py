"""A demo federation: keys, certificates, tokens, and one folder per role with just what that role may hold.

```
DIR/key-server     federation.toml ca.pem tls.pem tls-key.pem signing-key.pem state.sqlite
DIR/shuffler       federation.toml ca.pem tls.pem tls-key.pem aggregator-ca.pem signing-key.pem
DIR/aggregator     federation.toml ca.pem tls.pem tls-key.pem signing-key.pem run.toml
DIR/clients/NAME   federation.toml ca.pem token
DIR/authority      services.pem services-key.pem aggregator.pem aggregator-key.pem
```
Certificates come from two authorities: one for the services, one for the aggregator, which alone may connect to the
shuffler's second port. Their keys are for renewing certificates alone. In production every role makes its own keys on
its own machine.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from ntkfl.atomic import write_private
from ntkfl.crypto.certificates import TLS_CERT, TLS_KEY, Authority
from ntkfl.crypto.credentials import NAME_PATTERN
from ntkfl.crypto.hpke import SigningKey
from ntkfl.deployment.contract import Contract, Federation
from ntkfl.errors import ConfigError
from ntkfl.options import Options
from ntkfl.progress import plural
from ntkfl.safe_parse import parse_toml, read_toml
from ntkfl.services.key_server.store import DAY, LIFETIME, SIGNING_KEY, STATE, KeyServer
from ntkfl.services.trusted_peers import TrustedAggregator, TrustedKeyServer, TrustedShuffler

CA, AGGREGATOR_CA, AUTHORITY = "ca.pem", "aggregator-ca.pem", "authority"
TOKEN, RUN = "token", "run.toml"


# What a federation trains where nobody says otherwise: something that works at once, on data that come along.
DEMO_RUN = """\
# A federation to try out on one machine: the built-in digits, all roles of CP-NTK-FL as processes.
inputs = [1, 8, 8]
outputs = 10
rounds = 5
clients = {clients}
clients_per_round = {clients}
evaluators = {evaluators}
round_seconds = 60

[model]
name = "mlp"
hidden = [50]

[method]
name = "cp-ntk-fl"
projected_dim = 32
subsample_rate = 0.5
sparsity = 0.9
"""


class DemoSetup(Options):
    """Names, addresses and numbers of a demo federation."""

    federation: str = Field("demo", pattern=NAME_PATTERN)
    run: str = Field("run-0", pattern=NAME_PATTERN)
    clients: int = Field(4, ge=2, le=10_000)
    evaluators: int = Field(1, ge=0, le=100)
    min_clients: int = Field(2, ge=2)
    host: str = "127.0.0.1"
    key_server_host: str | None = Field(None, description="where it is not on `host`")
    shuffler_host: str | None = Field(None, description="where it is not on `host`")
    key_server_port: int = Field(8441, ge=1, le=65535)
    shuffler_port: int = Field(8442, ge=1, le=65535)
    aggregator_port: int = Field(8443, ge=1, le=65535, description="the shuffler's, for the aggregator")
    credential_days: float = Field(LIFETIME / DAY, ge=0.01, le=3650, description="that a client's credential is valid")

    def model_post_init(self, _: object) -> None:
        if self.min_clients > self.clients:
            raise ConfigError(f"{self.clients} clients can never make a batch of {self.min_clients} distinct ones")
        if len(set(self.urls)) < 3:
            raise ConfigError("the three ports must differ")

    @property
    def hosts(self) -> dict[str, str]:
        """Under which name or address each service is reached."""
        return {"key-server": self.key_server_host or self.host, "shuffler": self.shuffler_host or self.host}

    @property
    def urls(self) -> tuple[str, str, str]:
        """The key server's, the shuffler's for clients, and the shuffler's for the aggregator."""
        server, shuffler = self.hosts.values()
        return (
            _url(server, self.key_server_port),
            _url(shuffler, self.shuffler_port),
            _url(shuffler, self.aggregator_port),
        )


def _url(host: str, port: int) -> str:
    try:
        bracketed = ipaddress.ip_address(host).version == 6
    except ValueError:
        bracketed = False
    return f"https://[{host}]:{port}" if bracketed else f"https://{host}:{port}"


def demo_run(setup: DemoSetup) -> str:
    """A run.toml for such a federation: CP-NTK-FL on the built-in digits."""
    return DEMO_RUN.format(clients=setup.clients, evaluators=setup.evaluators)


def init(
    folder: Path, config: Path | str, setup: DemoSetup, on_client: Callable[[], None] = lambda: None
) -> Federation:
    """Make the folders of all roles in `folder`, which must be new or empty; `config` is the aggregator's run.toml, or
    its text.

    `on_client` is called after each client's.
    """
    values = read_toml(config) if isinstance(config, Path) else parse_toml(config)
    contract = Contract.of(values)
    _check_setup(contract, values.get("evaluators"), setup)
    contract = contract.spelled_out(allow_code=True)  # a file that its user wrote for the purpose
    authority = Authority(f"{setup.federation} services")
    callers = Authority(f"{setup.federation} aggregator")
    certificates = {role: authority.server(role, host) for role, host in setup.hosts.items()}
    certificates["aggregator"] = callers.client("aggregator")
    server_key, shuffler_key, aggregator_key = (SigningKey.generate() for _ in range(3))
    key_server, shuffler, for_aggregator = setup.urls
    federation = Federation(
        federation=setup.federation,
        run=setup.run,
        key_server=TrustedKeyServer(url=key_server, signing_key=server_key.public.hex()),
        shuffler=TrustedShuffler(
            url=shuffler,
            aggregator_url=for_aggregator,
            signing_key=shuffler_key.public.hex(),
            min_clients=setup.min_clients,
        ),
        aggregator=TrustedAggregator(signing_key=aggregator_key.public.hex()),
        terms=contract,
    )

    new_folder(folder, may_be_empty=True)
    for role, (certificate, key) in certificates.items():
        _role_folder(folder / role, federation, authority.pem)
        (folder / role / TLS_CERT).write_bytes(certificate)
        write_private(folder / role / TLS_KEY, key)
    new_folder(folder / AUTHORITY)
    authority.save(folder / AUTHORITY, "services")
    callers.save(folder / AUTHORITY, "aggregator")
    server_key.save(folder / "key-server" / SIGNING_KEY)
    shuffler_key.save(folder / "shuffler" / SIGNING_KEY)
    (folder / "shuffler" / AGGREGATOR_CA).write_bytes(callers.pem)
    aggregator_key.save(folder / "aggregator" / SIGNING_KEY)
    text = config.read_bytes() if isinstance(config, Path) else config.encode()
    (folder / "aggregator" / RUN).write_bytes(text)

    lifetime = max(1, round(setup.credential_days * DAY))
    server = KeyServer.create(folder / "key-server" / STATE, setup.federation, server_key, lifetime)
    server.add_run(setup.run)
    new_folder(folder / "clients")
    counts = (("client", setup.clients), ("evaluator", setup.evaluators))
    roles = {f"{role}-{number}": role for role, count in counts for number in range(count)}
    for name, token in server.make_tokens(roles).items():
        _client_folder(folder / "clients" / name, federation, authority.pem, token)
        on_client()
    return federation


def _check_setup(contract: Contract, evaluators: object, setup: DemoSetup) -> None:
    """`ConfigError` where what would be made can never play the run: it would be noticed only when all wait."""
    if isinstance(evaluators, int) and evaluators > setup.evaluators:
        raise ConfigError(
            f"the run waits for {plural(evaluators, 'evaluator')}, and folders for {setup.evaluators} would be made: "
            f"give --evaluators {evaluators}"
        )
    contract.check_evaluators(setup.evaluators)


def client_folder(folder: Path, key_server: Path, token: str) -> None:
    """A new folder for a client: whom it trusts, copied from the key server's folder, and its token."""
    _client_folder(folder, Federation.read(key_server), _read(key_server / CA), token)


def _client_folder(folder: Path, federation: Federation, ca: bytes, token: str) -> None:
    _role_folder(folder, federation, ca)
    write_private(folder / TOKEN, token.encode() + b"\n")


def _role_folder(folder: Path, federation: Federation, ca: bytes) -> None:
    new_folder(folder)
    federation.write(folder)
    (folder / CA).write_bytes(ca)


def new_folder(folder: Path, *, may_be_empty: bool = False) -> None:
    """Made for its owner alone; never one in which there is something."""
    try:
        if may_be_empty and folder.is_dir() and not any(folder.iterdir()):
            os.chmod(folder, 0o700)
        else:
            os.mkdir(folder, 0o700)
    except FileExistsError:
        raise ConfigError(f"{folder} is there already; keys are never overwritten: give a new folder") from None
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
