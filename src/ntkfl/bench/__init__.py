"""Measurements of this package beside the alternatives, in one process at one moment."""

from ntkfl.bench.accuracy import accuracy
from ntkfl.bench.clients import clients
from ntkfl.bench.kernel import kernel
from ntkfl.bench.networks import networks
from ntkfl.bench.round import round
from ntkfl.bench.rows import Row, Setting, Suite
from ntkfl.bench.scaling import scaling
from ntkfl.bench.servers import servers
from ntkfl.bench.wire import wire

# A suite's first docstring line is its title.
SUITES: dict[str, Suite] = {
    "kernel": kernel,
    "networks": networks,
    "round": round,
    "clients": clients,
    "wire": wire,
    "scaling": scaling,
    "servers": servers,
    "accuracy": accuracy,
}
# What each takes on two cores, about: for the time left.
SECONDS: dict[str, float] = {
    "kernel": 30,
    "networks": 20,
    "round": 120,
    "clients": 10,
    "wire": 10,
    "scaling": 200,
    "servers": 40,
    "accuracy": 55,
}

__all__ = ["SECONDS", "SUITES", "Row", "Setting", "Suite"]
