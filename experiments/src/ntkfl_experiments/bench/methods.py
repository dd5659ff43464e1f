"""A round of each method on the same clients, and the bytes it takes."""

from __future__ import annotations

import torch

import ntkfl
from ntkfl.federation.run_folder import Record
from ntkfl.methods import NTKFL, FedAdam, FedAvg, Method, Scaffold, SumNTKFL
from ntkfl_experiments.bench.timing import BenchRow, Setting, fashion, synthetic
from ntkfl_experiments.rivals.qsgd import QSGD, FedCOM

_METHODS: tuple[Method, ...] = (SumNTKFL(), NTKFL(), FedAvg(), Scaffold(), FedAdam(), FedCOM(), QSGD())
_CLIENTS = 20


def methods(setting: Setting) -> list[BenchRow]:
    """A round of each method with its defaults, without evaluation."""
    each, side, hidden, rounds = (5, 14, 16, 2) if setting.quick else (200, 28, 100, 4)
    count = (_CLIENTS + 1) * each
    x, y = synthetic(count, side) if setting.quick else fashion(count)[:2]
    parts = list(zip(torch.split(x, each), torch.split(y, each), strict=True))
    fed = ntkfl.data.from_clients(parts[1:], test=parts[0])
    return [_row(method, fed, side * side, hidden, rounds, setting) for method in _METHODS]


def _row(
    method: Method, fed: ntkfl.data.Federated, inputs: int, hidden: int, rounds: int, setting: Setting
) -> BenchRow:
    """The fastest round but the first, in which plans are made."""
    seconds, sent = [], [0.0, 0.0]

    def on_round(record: Record, timing: Record) -> None:
        seconds.append(timing["seconds"] - timing["evaluation_seconds"])
        sent[:] = [record[f"{way}_bytes"] / 2**20 for way in ("uplink", "downlink")]

    torch.manual_seed(0)
    model, watched = ntkfl.models.mlp(inputs, hidden, 10), [on_round]
    how = {"rounds": rounds, "clients_per_round": _CLIENTS, "device": setting.device, "callbacks": watched}
    ntkfl.train(model, fed, method, **how)  # type: ignore[arg-type]
    note = f"{sent[0]:,.3g} MiB up, {sent[1]:,.3g} down"
    return BenchRow(method.name, min(seconds[1:]), note=note, details={"up_mib": sent[0], "down_mib": sent[1]})
