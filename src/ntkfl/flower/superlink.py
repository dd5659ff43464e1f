"""Flower's SuperLink with a lock on its control interface: `python -m ntkfl.flower.superlink OPTIONS`.

Flower 1.41 serves the control interface (start and stop runs, register and unregister nodes) on the clients' port and
asks nobody who they are. One `UnregisterNode` of a stranger's then shuts a client out for good: a SuperLink never takes
a key again that was unregistered. Here every control request needs a token, which follows from the executor secret of
the server's folder. Clients need no token: they prove their keys.
"""

from __future__ import annotations

import argparse
import hmac
from collections.abc import Sequence
from hashlib import sha256
from importlib import import_module
from pathlib import Path

import httpx
from flwr.common.constant import ACCESS_TOKEN_KEY
from flwr.supercore.auth.typing import AccountInfo
from flwr.supercore.interceptors.http.utils import add_headers
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

from ntkfl.errors import ConfigError
from ntkfl.extras import install_command

SECRET_OPTION = "--superexec-auth-secret-file"
_LOADER = "load_control_authn_plugin"  # by which Flower's command finds who may use the control interface


def control_token(secret: bytes) -> str:
    """What a control request shows: HMAC-SHA256 of the executor secret, so that the secret itself never travels."""
    return hmac.new(secret, b"ntkfl control v1", sha256).hexdigest()


class ControlToken:
    """Puts the token on every request of a `ControlHttpClient`."""

    def __init__(self, secret: bytes) -> None:
        self._headers = {"Authorization": f"Bearer {control_token(secret)}"}

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        add_headers(context.request, self._headers)
        return call_next(context)


class TokenPlugin(NoOpControlAuthnPlugin):
    """One account, Flower's own for a SuperLink without accounts, for whoever has the token; nobody else has any."""

    def __init__(self, secret: bytes) -> None:
        super().__init__()
        self._token = control_token(secret).encode()

    def validate_tokens_in_metadata(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[bool, AccountInfo | None]:
        shown = [value for name, value in metadata if name == ACCESS_TOKEN_KEY]
        raw = [value.encode() if isinstance(value, str) else value for value in shown]
        if len(raw) != 1 or not hmac.compare_digest(raw[0], self._token):
            return False, None
        return super().validate_tokens_in_metadata(metadata)


def main() -> None:
    """`flower-superlink` with the same options; the file of the executor secret is needed."""
    command = import_module("flwr.superlink.cli.flower_superlink")
    if not hasattr(command, _LOADER):  # in another version of Flower's the token would be asked of nobody
        raise ConfigError(f"this Flower's control interface cannot be locked; {install_command('flower')}")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(SECRET_OPTION, dest="secret", type=Path, required=True)
    given, _ = parser.parse_known_args()
    plugin = TokenPlugin(given.secret.read_bytes())
    setattr(command, _LOADER, lambda: plugin)
    command.flower_superlink()


if __name__ == "__main__":
    main()
