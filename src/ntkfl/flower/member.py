"""A client of a deployment: its own data, read where they lie, and answers to the server it was told to answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ntkfl.deployment.client import check_data
from ntkfl.deployment.contract import Terms
from ntkfl.errors import ConfigError, DataError, MessageError
from ntkfl.federation.client_randomness import Draws, SystemDraws
from ntkfl.federation.evaluation import counts
from ntkfl.flower.client_memory import ClientMemory
from ntkfl.flower.records import check_size
from ntkfl.methods import ClientRound, Task
from ntkfl.methods.batchnorm import NAME, answer, load_statistics, statistics
from ntkfl.privacy.subsample import subsample
from ntkfl.wire import Message

RUN_PATTERN = "[0-9a-f]{16}"


class Member:
    """Answers with `read`'s data on the `terms` it pins: what a server sends are weights, never options.

    Data that cannot be used are an answer too, and are read again when next asked for. `number` is the client's among
    the federation's. What it keeps between rounds is in `folder`/memory.
    """

    def __init__(
        self,
        terms: Terms,
        folder: Path,
        read: Callable[[], tuple[Tensor, Tensor]],
        *,
        number: int = 0,
        clients: int = 1,
        draws: Draws | None = None,
        limit: int = 1 << 40,
        allow_code: bool = False,
    ) -> None:
        self.terms, self.folder, self.read, self.number, self.limit = terms, folder, read, number, limit
        self.draws: Draws = draws or SystemDraws()
        self.method = terms.build_method(allow_code=allow_code)
        if self.method.shuffle or self.method.projected_dim is not None:
            raise ConfigError("a shuffled or projected method needs a key server and a shuffler: give --federation")
        smoothing = self.method.label_smoothing
        model = terms.build_model(seed=0, allow_code=allow_code)
        self.task = Task(model, terms.outputs, self.method.loss, total_clients=clients, label_smoothing=smoothing)
        self._data: tuple[Tensor, Tensor] | None = None
        self._round: tuple[str, int] | None = None  # the run and round that `_client` is of
        self._client: ClientRound | None = None
        self._asked: set[str] = set()

    def answer(self, payload: bytes, run: str) -> bytes:
        """The reply to a message of the named run."""
        asked = Message.decode(payload)
        if not re.fullmatch(RUN_PATTERN, run):
            raise MessageError("a run has a name of 16 hexadecimal digits")
        if asked.kind == "evaluate":
            return self._evaluate(asked).encode()
        client, memory = self._at(asked, run), ClientMemory(self.folder / "memory" / run)
        reply = answer(self.method, self.task, asked, [client])[0]
        check_size(reply, self.limit, "from this client")
        encoded = reply.encode()
        memory.keep(asked.round, client.memory)
        return encoded

    def _at(self, asked: Message, run: str) -> ClientRound:
        """This client as it is in the round: samples are drawn once, and a question that comes again (as after a
        server's restart) finds the memory the round began with.
        """
        memory = ClientMemory(self.folder / "memory" / run)
        if self._client is None or self._round != (run, asked.round):
            x, y = self.data()
            rows = subsample(len(y), self.method.subsample_rate, self.draws.subsampling(asked.round))
            self._client = ClientRound(self.number, x[rows], y[rows], self.draws.randomness(asked.round))
            self._round, self._asked = (run, asked.round), set()
        if not self._asked or asked.kind in self._asked:
            self._client = replace(self._client, memory=memory.before(asked.round), statistics=None)
            self._asked = set()
        self._asked.add(asked.kind)
        return self._client

    def _evaluate(self, asked: Message) -> Message:
        own = statistics(self.task.model)
        if NAME in asked.arrays and own:
            load_statistics(self.task.model, asked.take(NAME, (sum(v.numel() for v in own.values()),), self.task.like))
        return counts(self.task, asked, *self.data())

    def data(self) -> tuple[Tensor, Tensor]:
        """Read and checked, once it is good."""
        if self._data is None:
            x, y = self.read()
            check_data(x, y, self.terms.inputs, self.terms.outputs)
            if y.is_floating_point() != self.terms.real_targets:
                raise DataError(
                    f"{'real' if y.is_floating_point() else 'whole'} targets; the run's terms say otherwise"
                )
            dtype = getattr(torch, self.terms.precision)
            x = x.to(dtype) if x.is_floating_point() else x
            self._data = x, y.to(dtype) if y.is_floating_point() else y.long()
        return self._data
