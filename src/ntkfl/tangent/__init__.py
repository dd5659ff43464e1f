"""The mathematics: Jacobians, kernels and their evolution. Knows nothing of clients, files or networks."""

from ntkfl.tangent.evolution import PAPER_STEPS, Evolution, evolve, geometric_steps
from ntkfl.tangent.jacobian import Jacobian, concatenate
from ntkfl.tangent.sparse import SparseBlock
from ntkfl.tangent.tracing import jacobian, jacobian_numbers, working_numbers

__all__ = [
    "PAPER_STEPS",
    "Evolution",
    "Jacobian",
    "SparseBlock",
    "concatenate",
    "evolve",
    "geometric_steps",
    "jacobian",
    "jacobian_numbers",
    "working_numbers",
]
