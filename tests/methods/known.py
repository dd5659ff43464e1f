"""The methods that tests hold to what every method promises: those of the package, and two whose replies are packed."""

from __future__ import annotations

from ntkfl_experiments.rivals.qsgd import QSGD, FedCOM

from ntkfl import methods
from ntkfl.methods import Method

METHODS: dict[str, type[Method]] = methods.METHODS | {"fedcom": FedCOM, "qsgd": QSGD}
