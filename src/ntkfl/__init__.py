"""Federated learning by neural tangent kernels: NTK-FL, CP-NTK-FL, and the baselines they are measured against."""

from ntkfl import data, methods, models, tangent
from ntkfl.engine import Run, train
from ntkfl.engine.export import load_exported
from ntkfl.errors import NTKFLError
from ntkfl.tangent import Evolution, Jacobian, concatenate, evolve, geometric_steps, jacobian
from ntkfl.version import __version__

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
