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

__all__ = ["SUITES", "Row", "Setting", "Suite"]
