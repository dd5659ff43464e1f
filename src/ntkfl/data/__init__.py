"""Datasets, and their partitions into clients."""

from ntkfl.data.catalog import NAMES, load
from ntkfl.data.dataset import Dataset, Federated
from ntkfl.data.files import from_file
from ntkfl.data.moments import Moments
from ntkfl.data.own import from_clients, from_datasets, from_folders, pictures
from ntkfl.data.partitions import IID, ByClient, ByWriter, Dirichlet, Shards

__all__ = [
    "IID",
    "NAMES",
    "ByClient",
    "ByWriter",
    "Dataset",
    "Dirichlet",
    "Federated",
    "Moments",
    "Shards",
    "from_clients",
    "from_datasets",
    "from_file",
    "from_folders",
    "load",
    "pictures",
]
