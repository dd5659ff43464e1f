"""What methods tell others of their rounds: audits, studies of Byzantine clients, privacy accounting."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ntkfl.tangent import Jacobian


class SampleRows(NamedTuple):
    """What a reply of rows holds of each of its n samples: J [n, d2, d], outputs [n, d2] and labels."""

    J: Jacobian
    outputs: Tensor
    labels: Tensor


class LocalUpdate(NamedTuple):
    """A client's weights [d] after local training, as its reply tells them, and how it came there."""

    weights: Tensor
    steps: int
    lr: float
    batch_size: int


class Corruption(NamedTuple):
    """How a Byzantine client corrupts a reply: a kind of attack, how far it is scaled, and what random parts follow."""

    kind: str
    scale: float
    seed: int


class Participation(NamedTuple):
    """How often a run used what it noised: `times` is the client that took part most often."""

    times: int
    cohort: int
    clients: int
    rounds: int
    simulated: bool
