"""Measurements of this package beside the alternatives, in one process at one moment."""

from ntkfl_experiments.bench.clients import clients
from ntkfl_experiments.bench.kernel import kernel
from ntkfl_experiments.bench.libraries import jacobians
from ntkfl_experiments.bench.memory import memory
from ntkfl_experiments.bench.methods import methods
from ntkfl_experiments.bench.start import start
from ntkfl_experiments.bench.timing import BenchRow, Setting, Suite

# A suite's first docstring line is its title.
SUITES: dict[str, Suite] = {
    "kernel": kernel,
    "jacobians": jacobians,
    "methods": methods,
    "clients": clients,
    "memory": memory,
    "start": start,
}

__all__ = ["SUITES", "BenchRow", "Setting"]
