"""A round of very many clients: their sums are added up in a tree of aggregators, and the server gets one reply."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from ntkfl.methods import ClientRound, SumNTKFL, Task
from ntkfl.models import mlp
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire.message import Message
from ntkfl_experiments.bench.inputs import fashion, synthetic
from ntkfl_experiments.bench.memory import peak_bytes, reset_peak
from ntkfl_experiments.bench.rows import BenchRow, Setting
from ntkfl_experiments.bench.scaling import slope

_CLIENTS: tuple[int, ...] = (100, 1_000, 10_000)
_QUICK: tuple[int, ...] = (6, 20)
_HELD: tuple[int, ...] = (100, 1_000)  # the same in one process without a tree, where all replies are held
_SAMPLES = 20  # of a client, drawn from a pool that does not grow with the clients
_POOL = 2_000
FAN = 10  # children of an aggregator


def tree(setting: Setting) -> list[BenchRow]:
    """A round of NTK-FL from sums with up to 10,000 clients, added up in a tree; each size in its own process."""
    sizes = _QUICK if setting.quick else _CLIENTS
    trees = [_measured("tree", M, setting) for M in sizes]
    rows = [_row(f"{M:,} clients, a tree", one, ours=True) for M, one in zip(sizes, trees, strict=True)]
    cpu, peak = (
        slope(sizes, [one["cpu"] * one["clients"] for one in trees]),
        slope(sizes, [one["peak"] for one in trees]),
    )
    told = f"log-log slopes from {sizes[0]:,} clients: processor time of the round {cpu:.2f}, peak memory {peak:.2f}"
    details = rows[-1].details | {"slope_cpu": cpu, "slope_peak": peak}
    rows[-1] = replace(rows[-1], note=f"{rows[-1].note}; {told}", details=details)
    held = [_measured("train", M, setting) for M in (sizes if setting.quick else _HELD)]
    rows += [_row(f"{int(one['clients']):,} clients, ntkfl.train", one) for one in held]
    growth = (held[-1]["added"] - held[0]["added"]) / (held[-1]["clients"] - held[0]["clients"])
    told = f"{rows[-1].note}; {growth / 1e6:.2f} MB for each further client"
    rows[-1] = replace(rows[-1], note=told, details=rows[-1].details | {"growth": growth})
    return rows


def _row(what: str, one: dict[str, float], ours: bool = False) -> BenchRow:
    memory = f"{one['peak'] / 1e6:,.0f} MB at the peak, {one['added'] / 1e6:,.0f} more than with two clients"
    spent = f"per client, {1e3 * one['cpu']:.1f} ms of processor time"
    note = f"{spent}; {memory}; {one['reply'] / 1e3:,.0f} kB per reply"
    if "depth" in one:
        note += f"; {one['depth']:.0f} levels, adding {one['adding'] / one['seconds']:.0%} of the time"
    return BenchRow(what, one["seconds"], note=note, details=one, ours=ours)


def add_up(replies: Iterable[Message]) -> Message:
    """Several clients' replies, or sums of them, as one: an aggregator's message, which a server reads as a reply."""
    total, number, halves = dict[str, Tensor](), 0, tuple[str, ...]()
    for reply in replies:
        total = {name: array + total[name] if total else array for name, array in reply.arrays.items()}
        number, halves = reply.round, reply.halves
    return Message("sums", number, total, halves)


def climb(clients: range, ask: Callable[[int], Message], add: Callable[[Iterable[Message]], Message]) -> Message:
    """The sum over a range of clients, by aggregators of up to `FAN` children each.

    Depth first, and children one at a time: on every level one running total is held, however many clients there are.
    """
    if len(clients) == 1:
        return ask(clients[0])
    step = 1
    while step * FAN < len(clients):
        step *= FAN
    parts = (clients[at : at + step] for at in range(0, len(clients), step))
    return add(climb(part, ask, add) for part in parts)


def depth(clients: int) -> int:
    """Levels of aggregators above so many clients, the server among them."""
    return 0 if clients <= 1 else 1 + depth(-(-clients // FAN))


def _measured(how: str, clients: int, setting: Setting) -> dict[str, float]:
    code = "from ntkfl_experiments.bench.tree import _main; _main()"
    arguments = [how, str(clients), str(int(setting.quick)), str(setting.device)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _main() -> None:
    how, clients, quick, device = sys.argv[1], int(sys.argv[2]), bool(int(sys.argv[3])), torch.device(sys.argv[4])
    side, hidden = (14, 16) if quick else (28, 100)
    x, y = synthetic(_POOL, side) if quick else fashion(_POOL)[:2]
    torch.manual_seed(0)
    model = mlp(side * side, hidden, 10)
    run = {"tree": through_a_tree, "train": trained_with}[how]
    run(model, x, y, 2, device)  # libraries warm up, and what a single client needs is there
    before, began = reset_peak(device), time.process_time()
    figures = run(model, x, y, clients, device)
    peak, cpu = peak_bytes(device), (time.process_time() - began) / clients
    figures |= {"cpu": cpu, "peak": peak, "added": peak - before, "clients": clients}
    print(json.dumps(figures))


def _drawn(i: int, pool: int) -> Tensor:
    return torch.randint(pool, (_SAMPLES,), generator=torch.Generator().manual_seed(i))


class SumsOfMany(SumNTKFL):
    """In a tree no single client's step can be limited."""

    step_limit: ClassVar[float] = 0.0


def through_a_tree(
    model: torch.nn.Module, x: Tensor, y: Tensor, clients: int, device: torch.device
) -> dict[str, float]:
    """One round of `sum-ntk-fl`: every message in its bytes, the method's own server at the top of the tree."""
    method = SumsOfMany()
    task = Task(model.to(device), 10, method.loss, label_smoothing=method.label_smoothing)
    x, y = x.to(device), y.to(device)
    spent = {"asking": 0.0, "reply": 0.0}
    began = time.perf_counter()
    conversation = method.round(task, method.start(task, task.like), 1, range(clients))
    question = next(conversation)
    assert isinstance(question, Message)
    heard = Message.decode(question.encode())

    def ask(i: int) -> Message:
        at = time.perf_counter()
        own = _drawn(i, len(y)).to(device)
        client = ClientRound(i, x[own], y[own], Randomness.simulated(i))
        sent = method.answer(task, heard, client).message(1).encode()
        spent["asking"] += time.perf_counter() - at
        spent["reply"] = len(sent)
        return Message.decode(sent)

    def add(replies: Iterable[Message]) -> Message:
        return Message.decode(add_up(replies).encode())

    top = climb(range(clients), ask, add)
    added = time.perf_counter()
    with suppress(StopIteration):
        conversation.send([method.replies["weights"].parse(top, task)])
    ended = time.perf_counter()
    return {
        "seconds": (added - began) / clients,  # the server's step is the same for any number of clients
        "adding": (added - began - spent["asking"]) / clients,
        "server": ended - added,
        "reply": spent["reply"],
        "depth": depth(clients),
    }


def trained_with(model: torch.nn.Module, x: Tensor, y: Tensor, clients: int, device: torch.device) -> dict[str, float]:
    """The same round by `ntkfl.train`, whose exchange holds all replies at once."""
    import ntkfl

    # Views of one pool, so that the data are the same size for any number of clients.
    pairs = [(x[at : at + _SAMPLES], y[at : at + _SAMPLES]) for at in (i % (_POOL - _SAMPLES) for i in range(clients))]
    fed = ntkfl.data.from_clients(pairs, test=(x[:50], y[:50]))
    began = time.perf_counter()
    run = ntkfl.train(model, fed, SumsOfMany(), rounds=1, clients_per_round=clients, device=device, callbacks=[])
    seconds = (time.perf_counter() - began) / clients
    return {"seconds": seconds, "reply": run.history[-1]["uplink_bytes"] / clients}
