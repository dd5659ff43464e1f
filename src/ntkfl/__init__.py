"""Federated learning by neural tangent kernels: NTK-FL, CP-NTK-FL, and the baselines they are measured against."""

from ntkfl import models, tangent
from ntkfl.errors import NTKFLError
from ntkfl.tangent import Evolution, Jacobian, concatenate, evolve, geometric_steps, jacobian
from ntkfl.version import __version__

__all__ = [
    "Evolution",
    "Jacobian",
    "NTKFLError",
    "__version__",
    "concatenate",
    "evolve",
    "geometric_steps",
    "jacobian",
    "models",
    "tangent",
]
