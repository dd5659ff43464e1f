"""A client of a deployment on Flower: its own data, read where they lie, and answers to its server."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ntkfl.deployment.contract import Terms
from ntkfl.errors import ConfigError, DataError, MessageError
from ntkfl.federation.client import Batch, Client, ClientRandomness, SystemRandomness, check_data
from ntkfl.federation.feature_cache import split_frozen
from ntkfl.flower.client_memory import ClientMemory
from ntkfl.flower.records import check_size
from ntkfl.methods import Task
from ntkfl.wire import Message

RUN_PATTERN = "[0-9a-f]{16}"


class FlowerClient:
    """Answers with `read`'s data on the `terms` it pins: what a server sends are weights, never options.

    Data that cannot be used are an answer too, and are read again when next asked for. `number` is the client's among
    the federation's. What it keeps between rounds is in `folder`/memory.
    """

    def __init__(
        self,
        terms: Terms,
        folder: Path,
        read: Callable[[], Batch],
        *,
        number: int = 0,
        clients: int = 1,
        randomness: ClientRandomness | None = None,
        limit: int = 1 << 40,
        allow_code: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.say, self._said = say, 0  # the last round that was said
        self.terms, self.folder, self.read, self.limit = terms, folder, read, limit
        method = terms.build_method(allow_code=allow_code)
        if method.shuffle or method.secure_sum or method.projected_dim is not None:
            raise ConfigError(
                "a shuffled, summed or projected method needs a key server and a shuffler: give --federation"
            )
        model = terms.build_model(seed=0, allow_code=allow_code)
        smoothing = method.label_smoothing
        trained, self.features = split_frozen(model, method, folder / "features")
        task = Task(trained, terms.outputs, method.loss, total_clients=clients, label_smoothing=smoothing)
        self.client = Client(number, task, method, self.data, randomness or SystemRandomness())
        self._data: Batch | None = None

    def answer(self, payload: bytes, run: str) -> bytes:
        """The reply to a message of the named run."""
        asked = Message.decode(payload)
        if not re.fullmatch(RUN_PATTERN, run):
            raise MessageError("a run has a name of 16 hexadecimal digits")
        if asked.kind == "evaluate":
            return self.client.evaluate(asked).encode()
        began = time.perf_counter()
        self.client.memory = ClientMemory(self.folder / "memory" / run)
        reply = self.client.answer(asked, run)
        check_size(reply, self.limit, "from this client")
        if asked.round != self._said:  # a line per round, whatever its exchanges
            self._said = asked.round
            self.say(f"answered round {asked.round} in {time.perf_counter() - began:.1f} s")
        return reply.encode()

    def data(self) -> Batch:
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
            x = x if self.features is None else self.features(x)
            self._data = x, y.to(dtype) if y.is_floating_point() else y.long()
        return self._data
