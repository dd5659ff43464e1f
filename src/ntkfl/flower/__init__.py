"""Every method inside Flower: `Strategy` on the server, `reply` in the client's `@app.train()`.

Only Flower's public API is used: `flwr.app`, `flwr.clientapp`, `flwr.serverapp`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ntkfl.extras import missing

if TYPE_CHECKING:
    from ntkfl.flower.client import reply
    from ntkfl.flower.shuffled import Shuffler
    from ntkfl.flower.strategy import Strategy

__all__ = ["Shuffler", "Strategy", "reply"]

if find_spec("flwr") is None:
    raise missing("ntkfl.flower", "flower")

# Imported when first used: a client's process does not need the server's side.
_HOMES = {"Shuffler": "shuffled", "Strategy": "strategy", "reply": "client"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ntkfl.flower' has no attribute {name!r}")
    return getattr(import_module(f"ntkfl.flower.{_HOMES[name]}"), name)
