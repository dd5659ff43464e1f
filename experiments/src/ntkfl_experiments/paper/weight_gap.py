"""Figure 9 and Lemma 2: how far the NTK weights w^(k,t) are from the weights of gradient descent, in ℓ1.

The lemma gives both descents the same residuals, those of gradient descent. The algorithm's weights have residuals of
their own, those of the linearised network. So three weights are compared here: gradient descent's, the lemma's (the
first Jacobian with gradient descent's residuals) and the algorithm's, by `ntkfl.evolve`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ntkfl.models import mlp
from ntkfl.tangent import evolve, jacobian
from ntkfl.tangent.losses import find_loss, targets
from ntkfl_experiments.paper.analysis import Cell, dataset, drawn, finite, unit_inputs
from ntkfl_experiments.theory.two_layer import draw

GRID = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)


def grid(steps: int) -> list[int]:
    """Steps at which weights are compared, up to `steps`."""
    return [t for t in GRID if t <= steps]


def gaps(
    model: nn.Module, x: Tensor, y: Tensor, lr: float, steps: Sequence[int], loss: str, scheme: str, every: bool = False
) -> Cell:
    """Gaps at `steps`, and what the bounds need, each a list over them, with the paper's trace kernel:

    `gap` is ‖w − w̃‖₁ of the algorithm's weights, `lemma` that of the lemma's; `gammas` is Σ_{u=1}^{t−1} max |error|
    along gradient descent, the error being y − f (`mse`) or y − softmax f (`ce`), and `first` the one at u = 0; `moved`
    is how far the furthest row of the first weight went; `differing`, with `every`, is Σ_{u<t} mean |r − r̃| of both.
    None stands for what diverged.
    """
    J = jacobian(model, x)
    with torch.no_grad():
        f0 = model(x)
    evolution = evolve(J, f0, y, lr, steps, loss, "trace", scheme)
    Y, residual = targets(y, f0.shape[1], loss, x.dtype), find_loss(loss).residual
    scale = f0.shape[1] if loss == "mse" else 1
    between = evolve(J, f0, y, lr, range(1, steps[-1]), loss, "trace", scheme).outputs if every else ()
    own = [residual(f, Y) for f in (f0, *between)]  # of the evolution at u = 0 … t − 1
    weights = [p for p in model.parameters() if p.requires_grad]
    begin = [p.detach().clone() for p in weights]
    summed, gamma, differing, first = torch.zeros_like(f0), 0.0, 0.0, 0.0
    found: Cell = {"gap": [], "lemma": [], "gammas": [], "moved": [], "differing": []}
    for step in range(steps[-1]):
        outputs = model(x)
        r = residual(outputs.detach(), Y)
        summed += r
        largest = float(r.abs().max()) * scale
        first = largest if step == 0 else first
        gamma += largest if step else 0.0
        differing += float((own[step] - r).abs().mean()) if every else 0.0
        slopes = torch.autograd.grad(outputs, weights, r * (lr / len(x)))
        with torch.no_grad():
            for p, slope in zip(weights, slopes, strict=True):
                p.add_(slope)
        if step + 1 in steps:
            change = torch.cat([(p.detach() - b).flatten() for p, b in zip(weights, begin, strict=True)])
            found["gap"].append(finite(float((evolution.delta(len(found["gap"])) - change).abs().sum())))
            found["lemma"].append(finite(float((J.vjp(summed) * (lr / len(x)) - change).abs().sum())))
            found["moved"].append(finite(float((weights[0].detach() - begin[0]).norm(dim=1).max())))
            found["gammas"].append(finite(gamma))
            found["differing"].append(differing)
    return {**found, "first": first}


def analysis_network(key: Mapping[str, Any]) -> Cell:
    """The lemma's own network, MSE, pictures of unit length, the paper's closed form."""
    x, y = unit_inputs(key["dataset"], key["samples"], key["seed"])
    model = draw(key["width"], x.shape[1], key["seed"]).module()
    answer = gaps(model, x, y.unsqueeze(1), key["lr"], key["steps"], "mse", "paper", key["every"])
    return {**answer, "inputs": x.shape[1]}


def perceptron(key: Mapping[str, Any]) -> Cell:
    """The paper's 784-100-10 network on normalised pictures: MSE by the closed form, or cross-entropy by the flow."""
    x, y = drawn(key["dataset"], key["samples"], key["seed"])
    torch.manual_seed(key["seed"])
    model = mlp(x[0].numel(), key["width"], dataset(key["dataset"]).output_dim).double()
    scheme = "paper" if key["loss"] == "mse" else "flow"
    return gaps(model, x.flatten(1).double(), y, key["lr"], key["steps"], key["loss"], scheme)
