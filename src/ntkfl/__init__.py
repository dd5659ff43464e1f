"""Federated learning by neural tangent kernels: NTK-FL, CP-NTK-FL, and the baselines they are measured against."""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from ntkfl.errors import NTKFLError
from ntkfl.version import __version__

if TYPE_CHECKING:
    from ntkfl import data, methods, models, tangent
    from ntkfl.compare.run import compare
    from ntkfl.federation.run import Run
    from ntkfl.federation.simulation import Progress, train
    from ntkfl.tangent import Evolution, Jacobian, Loss, concatenate, evolve, geometric_steps, jacobian

__all__ = [
    "Evolution",
    "Jacobian",
    "Loss",
    "NTKFLError",
    "Progress",
    "Run",
    "__version__",
    "compare",
    "concatenate",
    "data",
    "evolve",
    "geometric_steps",
    "jacobian",
    "methods",
    "models",
    "tangent",
    "train",
]

# OpenMP's threads spin for milliseconds while they wait for work, on cores that something else may need: with other
# programs running, a round of many small products took up to a hundred times as long. Asleep they cost about a tenth
# more on quiet cores (docs/results.md, "Two commands"). OpenMP reads this once, when torch is loaded.
if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}:
    os.environ["OMP_WAIT_POLICY"] = "passive"

_ROOMS = ("compare", "data", "methods", "models", "tangent")
_HOMES = {"Progress": "federation.simulation", "Run": "federation.run", "train": "federation.simulation"}


def __getattr__(name: str) -> object:
    """A public name, imported when first used: the command line answers `--help` without waiting seconds for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'ntkfl' has no attribute {name!r}")
    if name in _ROOMS:
        return import_module(f"ntkfl.{name}")
    value = getattr(import_module(f"ntkfl.{_HOMES.get(name, 'tangent')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
