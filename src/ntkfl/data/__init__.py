"""Datasets, and their partitions into clients."""

from ntkfl.data.catalog import NAMES, load
from ntkfl.data.dataset import Dataset
from ntkfl.data.dirichlet import Dirichlet
from ntkfl.data.federated import Federated
from ntkfl.data.from_arrays import from_clients, from_datasets
from ntkfl.data.partitions import IID, ByWriter, Shards

__all__ = [
    "IID",
    "NAMES",
    "ByWriter",
    "Dataset",
    "Dirichlet",
    "Federated",
    "Shards",
    "from_clients",
    "from_datasets",
    "load",
]
