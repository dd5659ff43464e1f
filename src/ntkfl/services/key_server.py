"""The key server: vouches for clients' keys, and gives each client the secret ρ of a run, sealed to it.

    DIR/key-server/   signing-key.pem   of credentials, and of each ρ that is given out
                      master            32 secret bytes, from which every ρ follows
                      issued/NAME       the credential of each client
                      revoked/NAME      an empty file, of a client that gets nothing more

    POST /v1/runs/RUN/secret   signed by a client: {sealed, signature}
    GET  /v1/revoked           names, for the shuffler

ρ of a run is BLAKE2b-256 of `bind("ntkfl rho v1", federation, run)`, keyed with the master: the same for all clients
of the run, and unrelated to any other run's. Revocation takes nothing back: a client that was given ρ has it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ntkfl.atomic import check_private, write_private
from ntkfl.crypto.context import Secret, bind
from ntkfl.crypto.hpke import KEY_BYTES
from ntkfl.crypto.signed import Credential, check_name, seal_run_secret
from ntkfl.errors import ConfigError, Refused
from ntkfl.services.peers import Peers
from ntkfl.services.web import SignedRequest, serve, service_app


class KeyServer:
    """Of a key server's folder. Serving writes nothing, so that operator commands may run beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.peers = folder, Peers.read(folder)
        self._key = self.peers.load_key(folder, "key_server")
        try:
            self._master = Secret((folder / "master").read_bytes())
        except OSError:
            raise ConfigError(f"no file {folder / 'master'}: without it every ρ is lost; begin a new one") from None
        check_private(folder / "master")

    @staticmethod
    def create(folder: Path) -> None:
        """What a new key server holds beside its keys."""
        write_private(folder / "master", os.urandom(KEY_BYTES))
        for name in ("issued", "revoked"):
            (folder / name).mkdir(mode=0o700)

    def issue(self, client: str, sealing_key: bytes, signing_key: bytes) -> str:
        """A credential for a client's two public keys. Once a name: two holders would count as one client."""
        check_name(client)
        issued = Credential(self.peers.federation, client, sealing_key.hex(), signing_key.hex()).issue(self._key)
        try:
            with open(self.folder / "issued" / client, "x") as file:
                file.write(issued)
        except FileExistsError:
            raise ConfigError(f"client {client!r} has a credential already: choose another name") from None
        return issued

    def revoke(self, client: str) -> None:
        """No ρ for this client any more, and the shuffler takes nothing from it."""
        check_name(client)
        if not (self.folder / "issued" / client).exists():
            raise ConfigError(f"no client {client!r}; {self.folder / 'issued'} has a file for each")
        (self.folder / "revoked" / client).touch()

    def revoked(self) -> list[str]:
        """Names of the revoked clients."""
        try:
            return sorted(os.listdir(self.folder / "revoked"))
        except OSError as error:
            raise Refused("storage", f"the revoked clients cannot be read: {error.strerror}") from None

    def run_secret(self, credential: Credential, run: str) -> dict[str, str]:
        """The run's ρ, sealed to the credential's holder, who must have been authenticated."""
        check_name(run)
        if credential.client in self.revoked():
            raise Refused("revoked", "this client is revoked")
        about = bind("ntkfl rho v1", self.peers.federation, run)
        secret = Secret(hashlib.blake2b(about, key=self._master.reveal(), digest_size=KEY_BYTES).digest())
        public = bytes.fromhex(credential.sealing_key)
        return seal_run_secret(secret, public, self._key, self.peers.federation, run, credential.client)


def serve_key_server(folder: Path, host: str | None = None, port: int | None = None) -> None:
    """Serve the state in `folder` until told to stop."""
    server = KeyServer(folder)
    serve("key-server", key_server_app(server), folder, server.peers.key_server.url, host, port)


def key_server_app(server: KeyServer) -> Starlette:
    """The two requests of the module's docstring, and `/health`."""

    async def run_secret(request: Request) -> Response:
        """ρ for the client that signed the request."""
        signed = SignedRequest(request, server.peers)
        if signed.credential is None:
            raise Refused("not-client", "only clients ask for this")
        await signed.body()
        return JSONResponse(await run_in_threadpool(server.run_secret, signed.credential, request.path_params["run"]))

    async def revoked(_: Request) -> Response:
        """For anybody: names are no secret to who takes part, and the shuffler has no credential."""
        return JSONResponse(await run_in_threadpool(server.revoked))

    routes = [Route("/v1/runs/{run}/secret", run_secret, methods=["POST"]), Route("/v1/revoked", revoked)]
    return service_app("key-server", routes)
