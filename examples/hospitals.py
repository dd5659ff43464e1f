"""Four synthetic "hospitals" with a table each: one model from one round, then without one of them, exactly.

The numbers are drawn here, not anybody's: 12 measurements and whether a patient came back. Hospitals differ in the
patients they see and in how often these come back, and none has enough of them to fit a model alone.
"""

import torch
from torch import nn

import ntkfl
from ntkfl.federation.shares import forget

NAMES = ("north", "south", "east", "west")
generator = torch.Generator().manual_seed(0)
effects = torch.randn(12, generator=generator)


def patients(count: int, shift: float, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 12, generator=generator) + shift * torch.linspace(-1, 1, 12)
    risk = x @ effects + rate + 2 * torch.randn(count, generator=generator)
    return x, (risk > 0).long()


differences = ((40, 0.0, -1.0), (25, 1.5, 0.5), (35, -1.5, 0.0), (20, 0.5, 1.0))
sites = [patients(*own) for own in differences]
later = [patients(500, shift, rate) for _, shift, rate in differences]  # of all sites, to test on
fed = ntkfl.data.from_clients(sites, test=(torch.cat([x for x, _ in later]), torch.cat([y for _, y in later])))
method = ntkfl.methods.SumRidge(keep_shares=True)
run = ntkfl.train(nn.Linear(12, 2), fed, method, rounds=1, clients_per_round=4, out="hospitals", callbacks=[])
print(f"all four, one round: {run.history[-1]['test_accuracy']:.1%}")
for name, site in zip(NAMES, sites, strict=True):
    one = ntkfl.data.from_clients([site], test=fed.test)
    own = ntkfl.train(nn.Linear(12, 2), one, ntkfl.methods.SumRidge(), rounds=1, clients_per_round=1, callbacks=[])
    print(f"{name} alone: {own.history[-1]['test_accuracy']:.1%}")

record = forget("hospitals", NAMES.index("west"))
print(f"without west, as if it had never taken part: weights changed by {record['relative_change']:.1%}")
