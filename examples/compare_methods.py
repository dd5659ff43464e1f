"""Several methods on the same clients and seeds, a table, and a page to look at."""

from pathlib import Path
from tempfile import mkdtemp

import ntkfl
from ntkfl.privacy.settings import Privacy
from ntkfl.report.page import write_report

METHODS = {
    "NTK-FL": (ntkfl.methods.NTKFL(), Privacy()),
    "CP-NTK-FL": (ntkfl.methods.CPNTKFL(), Privacy(projected_dim=32, subsample_rate=0.5, shuffle=False)),
    "FedAvg": (ntkfl.methods.FedAvg(lr=0.3, local_steps=10), Privacy()),
    "SCAFFOLD": (ntkfl.methods.Scaffold(lr=0.3, local_steps=10), Privacy()),
}
ROUNDS = 3

folder = Path(mkdtemp(prefix="ntkfl-"))
fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=30, alpha=0.1), seed=0)
print(f"{'method':10}  accuracy by round{' ' * (ROUNDS * 6 - 17)}  MiB up")
for name, (method, privacy) in METHODS.items():
    model = ntkfl.models.mlp(privacy.projected_dim or 64, 16, 10)
    how = {"rounds": ROUNDS, "clients_per_round": 8, "out": folder / name}
    run = ntkfl.train(model, fed, method, privacy=privacy, **how)
    accuracies = " ".join(f"{r['test_accuracy']:.3f}" for r in run.history)
    print(f"{name:10}  {accuracies}  {sum(r['uplink_bytes'] for r in run.history) / 2**20:.2f}")
print(f"report: {write_report([folder], folder / 'report.html')}")
