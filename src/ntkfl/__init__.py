"""Federated learning by neural tangent kernels: NTK-FL, CP-NTK-FL, and the baselines they are measured against."""

from importlib import import_module
from typing import TYPE_CHECKING

from ntkfl.errors import NTKFLError
from ntkfl.version import __version__

if TYPE_CHECKING:
    from ntkfl import data, methods, models, tangent
    from ntkfl.engine.export import load_exported
    from ntkfl.engine.run import Run
    from ntkfl.engine.simulation import train
    from ntkfl.tangent import Evolution, Jacobian, concatenate, evolve, geometric_steps, jacobian

__all__ = [
    "Evolution",
    "Jacobian",
    "NTKFLError",
    "Run",
    "__version__",
    "concatenate",
    "data",
    "evolve",
    "geometric_steps",
    "jacobian",
    "load_exported",
    "methods",
    "models",
    "tangent",
    "train",
]

# Imported when first used: the command line answers `--help` without waiting seconds for torch.
_ROOMS = ("data", "methods", "models", "tangent")
_HOMES = {
    "Run": "ntkfl.engine.run",
    "train": "ntkfl.engine.simulation",
    "load_exported": "ntkfl.engine.export",
    **dict.fromkeys(("Evolution", "Jacobian", "concatenate", "evolve", "geometric_steps", "jacobian"), "ntkfl.tangent"),
}


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return import_module(f"ntkfl.{name}")
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ntkfl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
