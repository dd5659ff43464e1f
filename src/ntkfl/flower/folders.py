"""The folders of a deployment: one for the server and one for each client, with just what each may hold.

```
DIR/server          server.toml run.toml ca.pem tls.pem tls-key.pem executor-secret clients/NAME.pub
DIR/clients/NAME    client.toml ca.pem node-key node-key.pub executor-secret
DIR/authority       services.pem services-key.pem
```
The certificate authority's key is for renewing the server's certificate alone. A client that does not want its key made
elsewhere makes one (`ssh-keygen -t ecdsa -b 384`) and gives the public half to the server's operator.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_public_key,
)
from pydantic import Field

from ntkfl.atomic import check_private, write_private
from ntkfl.crypto.certificates import TLS_CERT as TLS_CERT
from ntkfl.crypto.certificates import TLS_KEY as TLS_KEY
from ntkfl.crypto.certificates import Authority
from ntkfl.crypto.credentials import NAME_PATTERN
from ntkfl.deployment.contract import Terms
from ntkfl.deployment.demo_setup import AUTHORITY, new_folder
from ntkfl.errors import ConfigError
from ntkfl.flower.server import FlowerRun
from ntkfl.options import Options
from ntkfl.safe_parse import parse_toml, read_toml

CA, SECRET, NODE_KEY = "ca.pem", "executor-secret", "node-key"
ADDRESS = r"^(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$"


# What a deployment trains where nobody says otherwise.
DEMO_RUN = """\
# A deployment to try out: NTK-FL on the built-in digits.
inputs = [1, 8, 8]
outputs = 10
rounds = 5
clients = {clients}
clients_per_round = {clients}
round_seconds = 60

[model]
name = "mlp"
hidden = [50]

[method]
name = "ntk-fl"
"""


class ServerFile(Options):
    """server.toml: where the SuperLink is."""

    superlink: str = Field(pattern=ADDRESS, description="host:port that others connect to")

    @staticmethod
    def read(folder: Path) -> ServerFile:
        return ServerFile(**read_toml(folder / "server.toml"))

    @property
    def host(self) -> str:
        return self.superlink.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.superlink.rpartition(":")[2])


class ClientFile(Options):
    """client.toml: who this client is, whom it answers, and on what terms."""

    name: str = Field(pattern=NAME_PATTERN)
    number: int = Field(ge=0, description="its place among the clients")
    clients: int = Field(ge=1, description="of the whole federation")
    superlink: str = Field(pattern=ADDRESS)
    max_message_mb: float = Field(2000, gt=0)
    terms: Terms

    @staticmethod
    def read(folder: Path) -> ClientFile:
        return ClientFile(**read_toml(folder / "client.toml"))


def init(
    folder: Path,
    config: Path | None,
    clients: int,
    host: str = "127.0.0.1",
    port: int = 8000,
    on_client: Callable[[], None] = lambda: None,
) -> FlowerRun:
    """Make the folders in `folder`, which must be new; `config` becomes the server's run.toml, None a demo's.

    `on_client` hears of each client whose folder is made.
    """
    values = parse_toml(DEMO_RUN.format(clients=clients)) if config is None else read_toml(config)
    run = FlowerRun(**values).spelled_out(allow_code=True)  # a file that its user wrote for the purpose
    if clients < run.clients:
        raise ConfigError(f"{config} waits for {run.clients} clients; folders for {clients} are too few")
    server = ServerFile(superlink=f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    authority = Authority("ntkfl flower")
    certificate, key = authority.server("superlink", host)
    new_folder(folder)
    new_folder(folder / AUTHORITY)
    authority.save(folder / AUTHORITY, "services")
    new_folder(folder / "server")
    _write(folder / "server" / "server.toml", server.model_dump())
    text = DEMO_RUN.format(clients=clients).encode() if config is None else config.read_bytes()
    (folder / "server" / "run.toml").write_bytes(text)
    (folder / "server" / TLS_CERT).write_bytes(certificate)
    write_private(folder / "server" / TLS_KEY, key)
    new_folder(folder / "server" / "clients")
    new_folder(folder / "clients")
    terms = run.model_dump(mode="json", include=set(Terms.model_fields), exclude_none=True)
    _add_common(folder / "server", authority)
    for number in range(clients):
        own = folder / "clients" / f"client-{number}"
        new_folder(own)
        about = {"name": own.name, "number": number, "clients": clients, "superlink": server.superlink}
        _write(own / "client.toml", about | {"max_message_mb": run.max_message_mb, "terms": terms})
        private = ec.generate_private_key(ec.SECP384R1())
        write_private(own / NODE_KEY, private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        public = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
        for path in (own / f"{NODE_KEY}.pub", folder / "server" / "clients" / f"{own.name}.pub"):
            path.write_bytes(public)
        _add_common(own, authority)
        on_client()
    return run


def known_keys(server: Path) -> dict[str, bytes]:
    """Public keys (PEM) of the clients that may take part, by name; client-10 comes after client-9."""
    found = sorted((server / "clients").glob("*.pub"), key=lambda path: (len(path.stem), path.stem))
    return {path.stem: _public_key(path) for path in found}


def read_secret(folder: Path) -> bytes:
    try:
        secret = (folder / SECRET).read_bytes()
    except OSError:
        raise ConfigError(f"no {SECRET} in {folder}: is it a folder of `ntkfl flower init`?") from None
    check_private(folder / SECRET)
    return secret


def _public_key(path: Path) -> bytes:
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{path} holds no public key: make one with ssh-keygen -t ecdsa -b 384") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{path} must be an ECDSA key (ssh-keygen -t ecdsa -b 384)")
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _add_common(role: Path, authority: Authority) -> None:
    (role / CA).write_bytes(authority.pem)
    write_private(role / SECRET, secrets.token_bytes(32))


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(tomli_w.dumps(values))
