"""What each client's data are worth to the model: exact Shapley values from the clients' sums.

A coalition is worth the part of the squared error that the model solved from its sums removes, on everybody's samples.
All coalitions are tried, which takes 2^clients small solutions. Do not pay by such values without an audit: a client
that copies the others' samples raises its own.
"""

from itertools import combinations
from math import comb

import torch
from torch import nn

import ntkfl
from ntkfl.tangent.ridge import RidgeSums, total

PENALTY = 10.0  # the same for all coalitions: few samples that hardly vary would else be fitted without bound

fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=6, alpha=0.3), seed=1)
sums = []
for client in range(6):
    x, y = fed.client(client)
    sums.append(RidgeSums.of(x.flatten(1), nn.functional.one_hot(y, 10)))
sums.append(sums[0])  # a copy of the first client: the two share what it is worth
whole = total(sums)
penalties = PENALTY * torch.eye(len(whole.gram), dtype=torch.float64)
penalties[-1, -1] = 0  # the bias has none


def worth(coalition: tuple[int, ...]) -> float:
    """1 minus the part of the squared error that is left; 0 for a model that is worse than none."""
    if not coalition:
        return 0.0
    own = total([sums[client] for client in coalition])
    weights = torch.linalg.solve(own.gram + penalties, own.cross)
    return max(0.0, 1 - float(whole.error(weights) / whole.squares))


everybody = tuple(range(len(sums)))
known = {group: worth(group) for size in range(len(sums) + 1) for group in combinations(everybody, size)}
values = torch.zeros(len(sums), dtype=torch.float64)
for group, value in known.items():
    for client in set(everybody).difference(group):
        more = known[tuple(sorted((*group, client)))]
        values[client] += (more - value) / (len(sums) * comb(len(sums) - 1, len(group)))

for client, value in enumerate(values.tolist()):
    print(f"client {client}: {int(sums[client].samples)} samples, worth {value:.4f}")
print(f"all: {values.sum():.4f} of the squared error removed, {known[everybody]:.4f} by the model of all")
