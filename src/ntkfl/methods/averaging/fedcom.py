"""FedCOM. Haddadpour et al., Federated Learning with Compression: Unified Analysis and Sharp Guarantees, 2021.

Clients train locally and send their update quantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ntkfl.methods.averaging.qsgd import Compressed, Quantised
from ntkfl.methods.replies import Update


class EightBits(Quantised):
    """Unbiased, as the paper's analysis asks: random rounding to 8 bits, scaled by the largest value."""

    bits = 8
    norm = "max"


class FedCOM(Compressed):
    """Δ_m = Q((w − w_m) / lr), Δ = Σ_m p_m Δ_m, w ← w − lr server_lr Δ."""

    name: ClassVar[str] = "fedcom"
    paper: ClassVar[str] = "Haddadpour et al. 2021"
    replies: ClassVar[Mapping[str, type[Update]]] = {"weights": EightBits}
