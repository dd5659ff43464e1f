"""One file per method, each readable beside its paper. `METHODS` maps the names of the command line to classes."""

from ntkfl.methods.averaging.centralized import Centralized
from ntkfl.methods.averaging.data_share import DataShare
from ntkfl.methods.averaging.fedadam import FedAdam
from ntkfl.methods.averaging.fedavg import FedAvg
from ntkfl.methods.averaging.fednova import FedNova
from ntkfl.methods.averaging.fedprox import FedProx
from ntkfl.methods.averaging.scaffold import Scaffold
from ntkfl.methods.base import Method, Outcome
from ntkfl.methods.ntk_fl import CPNTKFL, NTKFL
from ntkfl.methods.robust import Robust
from ntkfl.methods.sums.kfac_fedavg import KfacFedAvg
from ntkfl.methods.sums.private_ridge import PrivateRidge
from ntkfl.methods.sums.private_sums import PrivateSums
from ntkfl.methods.sums.sum_ntk_fl import SumNTKFL
from ntkfl.methods.sums.sum_ridge import SumRidge
from ntkfl.methods.task import ClientRound, State, Task
from ntkfl.privacy.settings import Privacy

_SUMS = (SumNTKFL, KfacFedAvg, PrivateSums, SumRidge, PrivateRidge)
_AVERAGES = (FedAvg, FedProx, FedNova, Scaffold, FedAdam)
_ALL = (NTKFL, CPNTKFL, *_SUMS, *_AVERAGES, DataShare, Centralized)
METHODS: dict[str, type[Method]] = {method.name: method for method in _ALL}

__all__ = [
    "CPNTKFL", "METHODS", "NTKFL", "Centralized", "ClientRound", "DataShare", "FedAdam", "FedAvg",
    "FedNova", "FedProx", "KfacFedAvg", "Method", "Outcome", "Privacy", "PrivateRidge", "PrivateSums",
    "Robust", "Scaffold", "State", "SumNTKFL", "SumRidge", "Task",
]  # fmt: skip
