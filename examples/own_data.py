"""Data of your own: one (x, y) per client, and a test set. Here, five workshops whose machines wear differently."""

import numpy as np
import torch
from torch.utils.data import TensorDataset

import ntkfl

rng = np.random.default_rng(0)


def workshop(samples: int, tilt: float) -> tuple[np.ndarray, np.ndarray]:
    """Six sensors and whether the part will fail; each workshop sees another range of the first sensor."""
    x = rng.normal(size=(samples, 6))
    x[:, 0] += tilt
    return x, (x[:, 0] * x[:, 1] + x[:, 2] > 0.3).astype(int)


clients = [workshop(int(rng.integers(60, 200)), tilt) for tilt in (-2, -1, 0, 1, 2)]
test = workshop(1000, 0.0)
fed = ntkfl.data.from_clients(clients, test=test)
print(f"{len(fed)} clients with {fed.sizes} samples of {fed.classes} classes")

model = ntkfl.models.mlp(6, 32, 2)
run = ntkfl.train(model, fed, ntkfl.methods.NTKFL(), rounds=4, clients_per_round=5)
print(f"test accuracy by round: {[round(r['test_accuracy'], 3) for r in run.history]}")

# The same from torch Datasets: one per client, or a single one, dealt by a partition.
datasets = [TensorDataset(torch.tensor(x), torch.tensor(y)) for x, y in clients]
same = ntkfl.data.from_clients(datasets, test=test)
pooled = torch.utils.data.ConcatDataset(datasets)
dealt = ntkfl.data.from_datasets(pooled, test=test, partition=ntkfl.data.Dirichlet(clients=8, alpha=0.5), seed=0)
print(f"as Datasets: {same.fingerprint() == fed.fingerprint()}; dealt anew to {len(dealt)} clients: {dealt.sizes}")

# Real-valued targets train the same way, with loss="mse".
hours = ntkfl.data.from_clients([(x, x[:, :1] * 3 + 1) for x, _ in clients], test=(test[0], test[0][:, :1] * 3 + 1))
run = ntkfl.train(ntkfl.models.mlp(6, 32, 1), hours, ntkfl.methods.NTKFL(loss="mse"), rounds=4, clients_per_round=5)
print(f"mean squared loss by round: {[round(r['test_loss'], 3) for r in run.history]}")
