"""The core stands without its extras."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
for name in ("cryptography", "fastapi", "uvicorn", "httpx"):
    sys.modules[name] = None
import torch, ntkfl
from ntkfl.errors import ConfigError
import ntkfl.cli
fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=8, alpha=1.0), seed=0)
method = ntkfl.methods.CPNTKFL(projected_dim=20, shuffle=False)
run = ntkfl.train(ntkfl.models.mlp(20, 8, 10), fed, method, rounds=1, clients_per_round=3)
print(run.history[0]["test_accuracy"])
shuffled = method.model_copy(update={"shuffle": True})
try:
    ntkfl.train(ntkfl.models.mlp(20, 8, 10), fed, shuffled, rounds=1, clients_per_round=3)
except ConfigError as error:
    print(error)
"""


def test_everything_but_sealing_works_without_the_services_extra() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    accuracy, refusal = done.stdout.splitlines()
    assert 0 <= float(accuracy) <= 1
    assert "pip install 'ntkfl[services]'" in refusal
