"""Per-sample Jacobians, tangent kernels and linearised training of PyTorch models; needs PyTorch alone."""

from ntkfl.tangent.build import jacobian, plan_jacobian
from ntkfl.tangent.curvature import curvature_sums
from ntkfl.tangent.evolution import PAPER_STEPS, Evolution, evolve, geometric_steps
from ntkfl.tangent.flow import Flow
from ntkfl.tangent.jacobian import Jacobian, concatenate
from ntkfl.tangent.losses import Loss
from ntkfl.tangent.sparse import SparseBlock
from ntkfl.tangent.sums import Sums

__all__ = [
    "PAPER_STEPS",
    "Evolution",
    "Flow",
    "Jacobian",
    "Loss",
    "SparseBlock",
    "Sums",
    "concatenate",
    "curvature_sums",
    "evolve",
    "geometric_steps",
    "jacobian",
    "plan_jacobian",
]
