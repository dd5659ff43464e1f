"""One file a method, each readable beside its paper. `METHODS` maps the command line's names to classes."""

from ntkfl.methods.base import Client, Method, Outcome, State, Task
from ntkfl.methods.fedavg import FedAvg
from ntkfl.methods.ntk_fl import NTKFL

METHODS: dict[str, type[Method]] = {method.name: method for method in (NTKFL, FedAvg)}

__all__ = ["METHODS", "NTKFL", "Client", "FedAvg", "Method", "Outcome", "State", "Task"]
