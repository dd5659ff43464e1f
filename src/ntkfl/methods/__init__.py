"""One file a method, each readable beside its paper. `METHODS` maps the command line's names to classes."""

from ntkfl.methods.base import ClientRound, Method, Outcome, State, Task
from ntkfl.methods.centralized import Centralized
from ntkfl.methods.cp_ntk_fl import CPNTKFL
from ntkfl.methods.data_share import DataShare
from ntkfl.methods.dp_fedavg import DPFedAvg
from ntkfl.methods.fedadam import FedAdam
from ntkfl.methods.fedavg import FedAvg
from ntkfl.methods.fedcom import FedCOM
from ntkfl.methods.fednova import FedNova
from ntkfl.methods.fedprox import FedProx
from ntkfl.methods.ntk_fl import NTKFL
from ntkfl.methods.private_ridge import PrivateRidge
from ntkfl.methods.private_sums import PrivateSums
from ntkfl.methods.qsgd import QSGD
from ntkfl.methods.scaffold import Scaffold
from ntkfl.methods.sum_ntk_fl import SumNTKFL
from ntkfl.methods.sum_ridge import SumRidge

_SUMS = (SumNTKFL, PrivateSums, SumRidge, PrivateRidge)
_AVERAGES = (FedAvg, FedProx, FedNova, Scaffold, FedAdam, FedCOM, QSGD, DPFedAvg)
_ALL = (NTKFL, CPNTKFL, *_SUMS, *_AVERAGES, DataShare, Centralized)
METHODS: dict[str, type[Method]] = {method.name: method for method in _ALL}

__all__ = [
    "CPNTKFL",
    "METHODS",
    "NTKFL",
    "QSGD",
    "Centralized",
    "ClientRound",
    "DPFedAvg",
    "DataShare",
    "FedAdam",
    "FedAvg",
    "FedCOM",
    "FedNova",
    "FedProx",
    "Method",
    "Outcome",
    "PrivateRidge",
    "PrivateSums",
    "Scaffold",
    "State",
    "SumNTKFL",
    "SumRidge",
    "Task",
]
