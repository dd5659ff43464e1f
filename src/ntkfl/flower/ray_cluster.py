"""A Ray cluster for one simulation: on this machine's loopback address, with a secret that only its processes have.

Ray by itself listens on all interfaces, and runs what anybody who connects asks it to run.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from flwr.app import ConfigRecordValues

from ntkfl.errors import ConfigError
from ntkfl.extras import missing

_TOKEN = "RAY_AUTH_TOKEN"
# Read by Ray once, when it is imported.
_SETTINGS = {
    "RAY_AUTH_MODE": "token",  # every request to every port of Ray's needs the token
    # Ray replaces a loopback address it is given by the machine's own, except where it supports no clusters of several
    # machines. Told that this is such a place, all of its ports listen on 127.0.0.1.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


@contextmanager
def private_cluster(say: Callable[[str], None] = lambda line: None) -> Iterator[dict[str, ConfigRecordValues]]:
    """Arguments of `ray.init` for a new cluster that is this simulation's alone, for as long as the block lasts.

    Its token (256 bits) is in the environment of this process and of those it starts, nowhere else; its files and
    sockets, which Ray leaves open to all, lie in a folder of mode 700. A cluster that somebody set up before, named in
    `RAY_ADDRESS` or connected already, is used as it is: who may use that one is for its operator to say.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        say("uses the Ray cluster that is connected already: its operator says who may run programs there")
        yield {}
        return
    if address := os.environ.get("RAY_ADDRESS"):
        say(f"uses the Ray cluster at {address}: its operator says who may run programs there")
        yield {"address": address}
        return
    if "ray" not in sys.modules:
        os.environ.update(_SETTINGS)
    try:
        core: Any = import_module("ray._raylet")  # compiled, and without a word about its types
    except ImportError:
        raise missing("Flower's simulation", "flower") from None
    if core.get_authentication_mode() != core.AuthenticationMode.TOKEN:
        raise ConfigError("Ray was imported without authentication: set RAY_AUTH_MODE=token before it is imported")
    before = os.environ.get(_TOKEN)
    os.environ[_TOKEN] = secrets.token_hex(32)
    loaded = core.AuthenticationTokenLoader.instance()
    loaded.reset_cache()
    try:
        with tempfile.TemporaryDirectory(prefix="ntkfl-", dir=_temporary(), ignore_cleanup_errors=True) as folder:
            yield {"address": "local", "include_dashboard": False, "_temp_dir": os.path.join(folder, "ray")}
    finally:
        del os.environ[_TOKEN]
        if before is not None:
            os.environ[_TOKEN] = before
        loaded.reset_cache()


def _temporary() -> str | None:
    """Where Ray would put its files. Names of sockets must be short, and a Mac's own temporary folders are not."""
    return os.environ.get("RAY_TMPDIR") or ("/tmp" if sys.platform == "darwin" else None)
