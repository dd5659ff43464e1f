"""How badly conditioned kernels of real rounds are, and how far float32 is from float64 there: `python -m
tests.tangent.conditions`. Fashion-MNIST, 4 clients a round (Dirichlet 0.1, 300 clients), NTK-FL as it comes; minutes.
"""

from __future__ import annotations

import copy
import sys

import torch

import ntkfl

SAMPLES, ROUNDS = 240, 4
NETWORKS = {
    "mlp": lambda: ntkfl.models.mlp(784, 100, 10),
    "cnn": lambda: ntkfl.models.cnn((1, 28, 28), 10),
}


def look(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float, float, float]:
    """Largest eigenvalue of the kernel over 2N; condition number on 60 rows; float32's distance from float64 in the
    weights' change (largest over candidates, relative) and in the outputs (largest, absolute).
    """
    exact = copy.deepcopy(model).double()
    J, J64 = ntkfl.jacobian(model, x), ntkfl.jacobian(exact, x.double())
    few = J64[:60].dense().flatten(0, 1)  # [600, d]
    values = torch.linalg.eigvalsh(few @ few.T)
    v = torch.randn(len(x), 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for _ in range(50):  # power iteration with JJᵀ, which is never made
        v = J64.product(v / v.norm())
    rough = ntkfl.evolve(J, model(x).detach(), y, rtol=1e-6)  # far below what a round asks: what is left is float32's
    fine = ntkfl.evolve(J64, exact(x.double()).detach(), y, rtol=1e-6)
    changes = [(rough.delta(i).double(), fine.delta(i)) for i in range(len(fine.steps))]
    weights = max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in changes)
    outputs = float((rough.outputs.double() - fine.outputs).abs().max())
    return float(v.norm()) / (2 * len(x)), float(values[-1] / values[0].clamp_min(1e-300)), weights, outputs


def main() -> None:
    fed = ntkfl.data.load("fashion-mnist").partition(ntkfl.data.Dirichlet(clients=300, alpha=0.1), seed=0)
    print("network round  largest/2N  condition  weights   outputs")
    for name in sys.argv[1:] or NETWORKS:
        torch.manual_seed(0)
        model = NETWORKS[name]()
        for number in range(ROUNDS):
            run = ntkfl.train(model, fed, ntkfl.methods.NTKFL(), rounds=1, clients_per_round=4, seed=number)
            model = run.model
            x, y = (torch.cat(parts)[:SAMPLES] for parts in zip(*(fed.client(i) for i in range(4)), strict=True))
            found = look(model, x, y)
            print(
                f"{name:7} {number + 1:5} {found[0]:11.0f} {found[1]:10.1e} {found[2]:8.1e} {found[3]:9.1e}", flush=True
            )


if __name__ == "__main__":
    main()
