"""Federated learning by neural tangent kernels: NTK-FL, CP-NTK-FL, and the baselines they are measured against."""

from ntkfl import data, methods, models, tangent
from ntkfl.engine import Run, train
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
    "methods",
    "models",
    "tangent",
    "train",
]
