"""Measurements of this package beside the alternatives, in one process at one moment."""

from ntkfl_experiments.bench.accuracy import accuracy
from ntkfl_experiments.bench.clients import clients
from ntkfl_experiments.bench.jacobians import jacobians
from ntkfl_experiments.bench.kernel import kernel
from ntkfl_experiments.bench.networks import networks
from ntkfl_experiments.bench.products import products
from ntkfl_experiments.bench.profile import profile
from ntkfl_experiments.bench.round import round
from ntkfl_experiments.bench.rows import BenchRow, Setting, Suite
from ntkfl_experiments.bench.scaling import scaling
from ntkfl_experiments.bench.secure_sum import secure_sum
from ntkfl_experiments.bench.start import start
from ntkfl_experiments.bench.tree import tree
from ntkfl_experiments.bench.wire import wire

# A suite's first docstring line is its title.
SUITES: dict[str, Suite] = {
    "kernel": kernel,
    "networks": networks,
    "jacobians": jacobians,
    "round": round,
    "profile": profile,
    "products": products,
    "clients": clients,
    "wire": wire,
    "secure-sum": secure_sum,
    "scaling": scaling,
    "tree": tree,
    "accuracy": accuracy,
    "start": start,
}
# What each takes on two cores, about: for the time left.
SECONDS: dict[str, float] = {
    "kernel": 30,
    "networks": 40,
    "jacobians": 900,
    "round": 120,
    "profile": 35,
    "products": 10,
    "clients": 10,
    "wire": 10,
    "secure-sum": 30,
    "scaling": 300,
    "tree": 150,
    "accuracy": 55,
    "start": 25,
}

__all__ = ["SECONDS", "SUITES", "BenchRow", "Setting"]
