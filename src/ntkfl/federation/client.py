"""Simulated clients: any of a federation's, as it is in a round."""

from __future__ import annotations

import torch
from torch import Tensor

from ntkfl.data import Federated
from ntkfl.errors import ConfigError
from ntkfl.federation.client_randomness import SeededDraws
from ntkfl.federation.server_state import Batch
from ntkfl.methods import ClientRound, Method, State
from ntkfl.privacy.projection import RunSecret
from ntkfl.privacy.subsample import equal_rows, subsample


class Population:
    """The clients of `fed`, drawing from `seed`, their inputs as the network gets them. `rows` of samples is what each
    sends through a shuffler.
    """

    def __init__(
        self,
        fed: Federated,
        method: Method,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        secret: RunSecret | None = None,
    ) -> None:
        self.fed, self.method, self.seed, self.device, self.dtype = fed, method, seed, device, dtype
        self.secret = secret or RunSecret.simulated(seed)
        self.projection = method.make_projection(self.secret, fed.input_shape)
        self.rows = method.rows_per_client or equal_rows(fed.sizes, method.subsample_rate)
        self._cache: dict[int, Batch] = {}

    def client(self, i: int, number: int, memory: State) -> ClientRound:
        """Client `i` in round `number`, with the samples it uses there."""
        x, y = self._cache[i] if i in self._cache else self.place(self.fed.client(i))
        if self.device.type != "cpu":  # on the CPU, making rows again is cheaper than keeping all clients' floats
            self._cache[i] = (x, y)
        rows = self.drawn(i, number)
        if len(rows) < len(y):
            x, y = x[rows.to(x.device)], y[rows.to(y.device)]
        return ClientRound(i, x, y, SeededDraws(self.seed, i).randomness(number), dict(memory))

    def drawn(self, i: int, number: int) -> Tensor:
        """Which of its samples client i uses in round `number`, int64 [n].

        A simulation repeats, so even this comes from the seed; a deployed client asks its operating system.
        """
        draws = SeededDraws(self.seed, i).subsampling(number)
        most = self.rows if self.method.shuffle and self.method.sampled else None
        return subsample(self.fed.sizes[i], self.method.subsample_rate, draws, most)

    def place(self, batch: Batch) -> Batch:
        """A batch as the network gets it: on the device, projected."""
        x, y = batch[0].to(self.device), batch[1]
        if x.is_floating_point():  # tokens stay whole
            x = x.to(self.dtype)
        elif self.projection is not None:
            raise ConfigError("tokens cannot be projected: leave projected_dim out")
        return (
            x if self.projection is None else self.projection(x),
            y.to(self.device, self.dtype if y.is_floating_point() else y.dtype),
        )
