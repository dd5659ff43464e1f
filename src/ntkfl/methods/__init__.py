"""One file per method, each readable beside its paper. `METHODS` maps the names of the command line to classes."""

import importlib

from ntkfl.methods.base import Method, Outcome
from ntkfl.methods.task import ClientRound, State, Task

# TEMPORARY while files move: what does not import yet is left out. Replaced by plain imports when all do.
_WHERE = {
    "rows.ntk_fl": "NTKFL",
    "rows.cp_ntk_fl": "CPNTKFL",
    "sums.sum_ntk_fl": "SumNTKFL",
    "sums.private_sums": "PrivateSums",
    "sums.sum_ridge": "SumRidge",
    "sums.private_ridge": "PrivateRidge",
    "averaging.fedavg": "FedAvg",
    "averaging.fedprox": "FedProx",
    "averaging.fednova": "FedNova",
    "averaging.scaffold": "Scaffold",
    "averaging.fedadam": "FedAdam",
    "averaging.fedcom": "FedCOM",
    "averaging.qsgd": "QSGD",
    "sums.dp_fedavg": "DPFedAvg",
    "averaging.data_share": "DataShare",
    "averaging.centralized": "Centralized",
}
METHODS: dict[str, type[Method]] = {}
BROKEN: dict[str, str] = {}
for _module, _name in _WHERE.items():
    try:
        _kind = getattr(importlib.import_module(f"ntkfl.methods.{_module}"), _name)
    except Exception as error:
        BROKEN[_module] = f"{type(error).__name__}: {error}"
        continue
    globals()[_name] = METHODS[_kind.name] = _kind

__all__ = ["METHODS", "ClientRound", "Method", "Outcome", "State", "Task", *_WHERE.values()]
