"""Where the time of a round goes: a federation of the paper's size plays rounds, and every part of them is timed.

The parts are functions of the library that a round calls. For the time of the measurement each is wrapped in a clock:
a part's time is its own, without that of the parts inside it, and on a GPU a clock waits for all work given to it. So
the parts add up to the round, and nothing is done that a round of `ntkfl train` does not do, but waiting.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from pydantic import PrivateAttr
from torch import Tensor

from ntkfl.data import Dirichlet, Federated, from_clients
from ntkfl.data.catalog import load, locate
from ntkfl.federation import server
from ntkfl.federation.evaluation import OwnTestSet
from ntkfl.federation.simulation import Simulation
from ntkfl.methods import NTKFL, Task, ntk_fl
from ntkfl.methods.ntk_fl import CandidateLosses, Gathered, TangentRows
from ntkfl.models import mlp
from ntkfl.tangent import Evolution
from ntkfl.tangent.gemm import times_transposed
from ntkfl.wire.message import Message
from ntkfl_experiments.bench.inputs import synthetic
from ntkfl_experiments.bench.race import finish
from ntkfl_experiments.bench.rows import BenchRow, Setting

REST, EVOLUTION = "everything else", "server: evolution"
# The object, the name of the function in it, and what the part is called.
PARTS: tuple[tuple[Any, str, str], ...] = (
    (TangentRows, "of", "clients: Jacobians"),
    (CandidateLosses, "of", "clients: candidates scored"),
    (Message, "encode", "messages: encoded"),
    (Message, "decode", "messages: decoded"),
    (server, "filter_replies", "server: messages read and checked"),
    (ntk_fl, "gather", "server: rows put together"),
    (NTKFL, "evolve", EVOLUTION),
    (Evolution, "deltas", "server: weights of all candidates"),
    (ntk_fl, "candidates_question", "server: candidates packed"),
    (OwnTestSet, "measure", "evaluation"),
)
_CLIENTS = 20


class Clocks:
    """Seconds by part, each without the parts inside it, by the clock and of the processor; `calls` by part."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.processor: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._inner: list[tuple[float, float]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        finish(self.device)
        self._inner.append((0.0, 0.0))
        began = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            finish(self.device)
            clock, processor = time.perf_counter() - began[0], time.process_time() - began[1]
            inner = self._inner.pop()
            self.seconds[name] += clock - inner[0]
            self.processor[name] += processor - inner[1]
            self.calls[name] += 1
            if self._inner:
                around = self._inner[-1]
                self._inner[-1] = (around[0] + clock, around[1] + processor)

    @contextmanager
    def on(self, parts: tuple[tuple[Any, str, str], ...]) -> Iterator[None]:
        """Inside the block every call of these functions is timed."""
        with ExitStack() as stack:
            for owner, attribute, name in parts:
                stack.enter_context(patch.object(owner, attribute, self._timed(vars(owner)[attribute], name)))
            yield

    def _timed(self, function: Any, name: str) -> Any:
        bound = type(function) if isinstance(function, staticmethod | classmethod) else None
        plain: Callable[..., Any] = function.__func__ if bound else function

        @wraps(plain)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return plain(*args, **kwargs)

        return bound(timed) if bound else timed


class _Counting(NTKFL):
    """The default method, and the multiplications and additions of its evolutions' kernel products."""

    _flop: float = PrivateAttr(0.0)
    _products: int = PrivateAttr(0)

    def evolve(self, task: Task, rows: Gathered, times: Sequence[float]) -> Evolution:
        evolution = super().evolve(task, rows, times)
        self._products += evolution.statistics.evaluations
        # There and back through every layer: twice the weights, biases aside, for a product and a row.
        self._flop += 4.0 * evolution.statistics.evaluations * len(rows.y) * task.like.numel()
        return evolution


def profile(setting: Setting) -> list[BenchRow]:
    """Where the time of a round goes: the default method, messages in bytes, with evaluation."""
    data, called = _data(setting)
    torch.manual_seed(0)
    width, hidden, rounds = math.prod(data.input_shape), *((16, 1) if setting.quick else (100, 5))
    method, network = _Counting(), mlp(width, hidden, data.output_dim)
    federation = Simulation(
        network, data, method, clients_per_round=_CLIENTS, robust="on", device=setting.device
    ).server
    federation.play(1)  # plans, caches, and on a GPU its libraries: once in a run
    method._flop, method._products = 0.0, 0
    clocks, samples, peak = Clocks(setting.device), 0, 0.0
    for number in range(2, rounds + 2):
        with clocks.on(PARTS), clocks.part(REST):
            samples += federation.play(number)[0]["samples"]
        peak = max(peak, _product_rate(samples // (number - 1), width, hidden, setting))
    total, size = sum(clocks.seconds.values()), f"{width}-{hidden}-{data.output_dim}"
    rows = [
        BenchRow(
            "a whole round",
            total / rounds,
            1.0,
            note=f"mean of {rounds}; {_CLIENTS} clients of {called}, {samples // rounds:,} rows, {size}; "
            f"matrix products of its shape {peak / 1e9:,.0f} GFLOP/s",
            details={"product_flops": peak},
        )
    ]
    for name, seconds in sorted(clocks.seconds.items(), key=lambda item: -item[1]):
        share, calls = seconds / total, clocks.calls[name] / rounds
        details = {"share": share, "calls": calls, "processor_seconds": clocks.processor[name] / rounds}
        note = f"{share:.1%}, {calls:g} calls"
        if name == EVOLUTION:
            # A busy machine takes the processor away now and then: what it gave is compared with what it gave.
            busy = seconds if setting.device.type != "cpu" else clocks.processor[name] / torch.get_num_threads()
            details |= {"products": method._products / rounds, "of_peak": method._flop / busy / peak}
            note += f", {details['products']:g} products, {details['of_peak']:.0%} of their peak"
        rows.append(BenchRow(name, seconds / rounds, note=note, details=details))
    return rows


def _data(setting: Setting) -> tuple[Federated, str]:
    """Fashion-MNIST over 300 clients where it is on this machine, else images alike: inputs flat, as the MLP's are."""
    if not setting.quick and locate("fashion-mnist") is not None:
        return load("fashion-mnist").partition(Dirichlet(clients=300, alpha=0.1), seed=0), "Fashion-MNIST"
    side, each = (14, 5) if setting.quick else (28, 200)
    x, y = synthetic((_CLIENTS + 1) * each, side)
    clients = list(zip(torch.split(x, each), torch.split(y, each), strict=True))
    return from_clients(clients[1:], test=clients[0]), "synthetic images"


def _product_rate(rows: int, width: int, hidden: int, setting: Setting) -> float:
    """Operations per second of the two matrix products that a kernel product consists of, there and back: the best of
    several calls, on a CPU per second of all its threads' processor time.
    """
    device = setting.device
    a, r = torch.randn(rows, width, device=device), torch.randn(hidden, rows, device=device)
    across, weight, best = a.T.contiguous(), torch.randn(hidden, width, device=device), [math.inf, math.inf]
    ways: list[Callable[[], Tensor]] = [lambda: times_transposed(r, across), lambda: times_transposed(a, weight)]
    clock: Callable[[], float] = _processor_time if device.type == "cpu" else time.perf_counter
    calls = 1 if device.type == "cpu" else 50
    for i, way in [*enumerate(ways)] * (2 if setting.quick else 20):
        finish(device)
        began = clock()
        for _ in range(calls):
            way()
        finish(device)
        best[i] = min(best[i], (clock() - began) / calls)
    return 4.0 * rows * width * hidden / sum(best)


def _processor_time() -> float:
    """Of a thread, if all of torch's work alike."""
    return time.process_time() / torch.get_num_threads()
