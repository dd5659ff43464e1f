"""How far honest rows differ in size: the largest over the median, in each way that rows are measured, over rounds.

`python -m tests.federation.row_sizes`: the figures behind `NTKFL.extreme` and `row_clip` in docs/robustness.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import torch
from sklearn.datasets import load_breast_cancer, load_diabetes
from torch import nn

import ntkfl
from ntkfl.data import Federated
from ntkfl.federation import validation as sifting
from ntkfl.methods import METHODS, Method

Case = tuple[str, Callable[[], nn.Module], Federated, Method]


def digits(shape: tuple[int, ...] = (1, 8, 8)) -> Federated:
    fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=20, alpha=0.1), seed=0)
    x, y = fed.test
    parts = [fed.client(i) for i in range(len(fed))]
    return ntkfl.data.from_clients([(a.view(-1, *shape), b) for a, b in parts], test=(x.view(-1, *shape), y))


def table(source: Callable[[], object], standardised: bool, real: bool) -> Federated:
    raw = source()
    x, y = torch.tensor(raw.data).float(), torch.tensor(raw.target)  # type: ignore[attr-defined]
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x = (x - x.mean(0)) / x.std(0) if standardised else x / x.abs().mean()
    y = ((y - y.mean()) / y.std()).float().unsqueeze(1) if real else y.long()
    x, y = x[order], y[order]
    parts = [(x[at : at + 30], y[at : at + 30]) for at in range(0, 300, 30)]
    return ntkfl.data.from_clients(parts, test=(x[300:], y[300:]))


def cases() -> Iterator[Case]:
    ntk, models = METHODS["ntk-fl"], ntkfl.models
    cp = METHODS["cp-ntk-fl"](projected_dim=40)
    yield "digits, `mlp`, NTK-FL", lambda: models.mlp(64, 48, 10), digits(), ntk()
    yield "digits, `mlp`, CP-NTK-FL", lambda: models.mlp(40, 48, 10, gain=0.7, bias=-1.0), digits(), cp
    small = ntk(subsample_rate=0.3)
    yield "digits, `resnet`", lambda: models.resnet((1, 8, 8), 10, channels=(8, 16)), digits(), small
    yield "digits, `gru`", lambda: models.gru((8, 8), 10, width=24), digits((8, 8)), small
    yield "digits, `transformer`", lambda: models.transformer((8, 8), 10), digits((8, 8)), small
    for standardised in (False, True):
        name = f"breast cancer, {'standardised' if standardised else 'raw'} columns, `mlp`"
        yield name, lambda: models.mlp(30, 32, 2), table(load_breast_cancer, standardised, real=False), ntk()
    mse = ntk(loss="mse")
    yield "diabetes, real targets, `mlp`", lambda: models.mlp(10, 32, 1), table(load_diabetes, True, real=True), mse


def main(rounds: int = 4) -> None:
    bounds = sifting._bounds
    print(
        "| rows | Jacobian's norm | largest output | largest target | largest number |\n| --- | --- | --- | --- | --- |"
    )
    for name, build, fed, method in cases():
        seen: list[torch.Tensor] = []

        def listening(sizes: list[torch.Tensor], extreme: object, seen: list[torch.Tensor] = seen) -> None:
            if sizes:
                columns = torch.cat(sizes).double().T
                seen.append(torch.stack([c.max() / c[c > 0].median() if c.any() else c.max() for c in columns]))

        torch.manual_seed(0)
        with mock.patch.object(sifting, "_bounds", listening):
            ntkfl.train(build(), fed, method, rounds=rounds, clients_per_round=10, callbacks=[])
        print(f"| {name} | " + " | ".join(f"{v:.1f}" for v in torch.stack(seen).amax(0).tolist()) + " |", flush=True)
    assert sifting._bounds is bounds


if __name__ == "__main__":
    main()
