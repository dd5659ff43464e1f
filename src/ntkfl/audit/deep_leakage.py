"""Attack 2: dummy inputs optimised until they would have sent what was received.

Zhu, Liu and Han, Deep Leakage from Gradients, NeurIPS 2019; the total variation is Geiping et al.'s, NeurIPS 2020. The
original matches one gradient of a batch. Here the target is a sample's Jacobian (all of it, the entries that were sent,
or, as one who does not know of sparsification would, zeros for the others), the gradient of a batch's loss, or what a
client of federated averaging sends after local training, which is played again step by step for the dummies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap

from ntkfl.audit.analytic import LinearLayer
from ntkfl.audit.descent import Loss, minimise
from ntkfl.tangent.build import plan_jacobian
from ntkfl.tangent.losses import per_sample
from ntkfl.tangent.parameters import call_with, column_slices, evaluating, trainable
from ntkfl.tangent.passes import JacobianPlan, substituted, tapped_forward

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Settings:
    """How dummies are optimised. `variation` weighs the total variation of dummies that are pictures."""

    optimiser: str = "lbfgs"
    steps: int = 60
    restarts: int = 2
    lr: float = 0.1  # of Adam
    variation: float = 0.0
    spread: float = 1.0  # of the dummies to begin with: large enough to switch units on
    seed: int = 0


def match_jacobian(model: nn.Module, shape: Sequence[int], J: Tensor, match: str = "sent") -> Loss:
    """‖Ĵ_i − J_i‖²/‖J_i‖² of dummies [R·n, d1], R blocks of n, against received J [n, d2, d], zeros being entries that
    were not sent: "sent" compares where something was, "zeros" takes the rest for true zeros.

    Of a linear layer that each sample passes once, Ĵ is g ⊗ [a, 1]: its distance to J needs g and a alone, Σ M (g a)² −
    2 gᵀ J a + ‖J‖² with M what is compared. All other derivatives are made in full: those of other layers, of a layer
    that is used twice or at several positions, of weights that are tied or also used in another way.
    """
    probe = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(J)
    with evaluating(model):
        plan = plan_jacobian(model, probe)
        layers = _used_once(model, plan, probe)
    slices = column_slices(trainable(model))
    size = J.square().sum((1, 2)).clamp_min(torch.finfo(J.dtype).tiny)
    factored = [columns for layer in layers.values() for columns in (layer.weight, layer.bias)]
    rest = [name for name, columns in slices.items() if columns not in factored]
    targets = {name: _augmented(J, layer) for name, layer in layers.items()}
    sizes = {name: T.square().sum((1, 2)) for name, T in targets.items()}
    masks = {name: T.ne(0).to(T) for name, T in targets.items()} if match == "sent" else {}

    def loss(x: Tensor) -> Tensor:
        R, n = len(x) // len(J), len(J)
        total = x.new_zeros(R, n)
        with evaluating(model), substituted(plan.known, {}):  # no fused kernels, which may have no derivative
            inputs = x.view(-1, *shape)
            for name, (g, a) in _factors(model, layers, inputs).items():
                g, a = (t.view(R, n, -1).permute(1, 2, 0) for t in (g, a))  # [n, ·, R]
                own = torch.bmm(masks[name], a.square()) if masks else a.square().sum(1, keepdim=True)
                total = total + (own * g.square() - 2 * g * torch.bmm(targets[name], a)).sum(1).T + sizes[name]
            if rest:
                for name, value in _derivatives(model, rest, inputs).items():
                    target = J[:, :, slices[name]]
                    error = value.reshape(R, n, *target.shape[1:]) - target
                    error = error * target.ne(0) if match == "sent" else error
                    total = total + error.square().sum((2, 3))
        return (total / size).flatten()

    return loss


def _used_once(model: nn.Module, plan: JacobianPlan, probe: Tensor) -> dict[str, LinearLayer]:
    """The linear layers by name whose weights train and enter in one product a sample, out [N, n_out] = W a + b."""
    calls = tapped_forward(model, probe, plan.known, {part.use.module for part in plan.parts})[0]
    found = {}
    for part in plan.parts:
        module, dimensions = plan.known[part.use.module], [a.ndim for a, _ in calls[part.use]]
        if isinstance(module, nn.Linear) and part.weight is not None and dimensions == [2]:
            found[part.use.module] = LinearLayer(module, part.weight, part.bias)
    return found


def _augmented(J: Tensor, layer: LinearLayer) -> Tensor:
    """∂f/∂[W, b] of a linear layer as received, [n, d2·n_out, n_in + 1]; without the last column where no b trains."""
    n, rows = len(J), J.shape[1] * layer.module.out_features
    W = J[:, :, layer.weight].reshape(n, rows, -1)
    return W if layer.bias is None else torch.cat([W, J[:, :, layer.bias].reshape(n, rows, 1)], 2)


def _factors(model: nn.Module, layers: dict[str, LinearLayer], x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """(g [N, d2·n_out], [a, 1] [N, n_in + 1]) of each linear layer, as functions of x that can be differentiated."""
    if not layers:
        return {}
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def keep(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            seen[name] = (inputs[0], output)
            return output.clone()  # an in-place activation behind the layer must not overwrite the output kept

        return keep

    handles = [layer.module.register_forward_hook(hook(name)) for name, layer in layers.items()]
    with torch.enable_grad():
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        try:
            f = model(x)
        finally:
            for handle in handles:
                handle.remove()
        outs = [seen[name][1] for name in layers]
        columns = [
            torch.autograd.grad(f[:, o].sum(), outs, create_graph=True, materialize_grads=True)
            for o in range(f.shape[1])
        ]
    found = {}
    for i, (name, layer) in enumerate(layers.items()):
        a = seen[name][0]
        if layer.bias is not None:
            a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
        found[name] = (torch.stack([column[i] for column in columns], 1).flatten(1), a)
    return found


def _derivatives(model: nn.Module, names: list[str], x: Tensor) -> Parameters:
    """∂f/∂(these parameters) of every row, [N, d2, ...] each, differentiable by x."""
    parameters = trainable(model)

    def outputs(p: Parameters, sample: Tensor) -> Tensor:
        return call_with(model, p, sample.unsqueeze(0)).squeeze(0)

    chosen = {name: parameters[name].detach() for name in names}
    found: Parameters = vmap(jacrev(outputs), in_dims=(None, 0))(chosen, x)
    return found


def match_gradient(
    model: nn.Module, shape: Sequence[int], gradient: Tensor, Y: Tensor, kind: str, sent: Tensor | None = None
) -> Loss:
    """‖ĝ − g‖²/‖g‖² for dummy batches [R, B·d1] against a gradient [d] of the mean loss over B samples with targets Y
    [B, d2], where `sent` [d] (everywhere).
    """
    parameters = {name: p.detach() for name, p in trainable(model).items()}
    each = grad(_mean_loss(model, kind))

    def one(batch: Tensor) -> Tensor:
        g = each(parameters, batch.view(len(Y), *shape), Y)
        return torch.cat([p.reshape(-1) for p in g.values()])

    return _apart(model, one, gradient, sent)


def match_update(
    model: nn.Module,
    shape: Sequence[int],
    change: Tensor,
    samples: int,
    outputs: int,
    kind: str,
    lr: float,
    steps: int,
    sent: Tensor | None = None,
) -> Loss:
    """‖Δ̂ − Δ‖²/‖Δ‖² for dummies [R, B·d1 + B·d2] against w_m − w [d] after `steps` full-batch steps of rate `lr`.

    The last B·d2 numbers are the dummies' labels before a softmax: nobody sent any. Local training is unrolled.
    """
    start = {name: p.detach() for name, p in trainable(model).items()}
    each = grad(_mean_loss(model, kind))

    def one(dummy: Tensor) -> Tensor:
        x = dummy[: -samples * outputs].view(samples, *shape)
        Y = dummy[-samples * outputs :].view(samples, outputs).softmax(1)
        w = dict(start)
        for _ in range(steps):
            g = each(w, x, Y)
            w = {name: p - lr * g[name] for name, p in w.items()}
        return torch.cat([(w[name] - start[name]).reshape(-1) for name in start])

    return _apart(model, one, change, sent)


def _apart(model: nn.Module, one: Callable[[Tensor], Tensor], target: Tensor, sent: Tensor | None) -> Loss:
    """‖v̂ − v‖²/‖v‖² of the vector [d] that `one` makes of each dummy, where it was sent (everywhere)."""
    where = torch.ones_like(target) if sent is None else sent.to(target)
    size = (target * where).square().sum().clamp_min(torch.finfo(target.dtype).tiny)

    def loss(x: Tensor) -> Tensor:
        with evaluating(model):
            return torch.stack([((one(dummy) - target) * where).square().sum() / size for dummy in x])

    return loss


def reconstruct(
    loss: Loss, targets: int, width: int, settings: Settings, image: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """(dummies [targets, width], how well each matches [targets]): of all restarts, those that match best."""
    generator = torch.Generator().manual_seed(settings.seed)
    start = settings.spread * torch.randn(settings.restarts * targets, width, generator=generator)
    objective = loss
    if settings.variation and image is not None:
        objective = _with_variation(loss, settings.variation, image)
    x, _ = minimise(objective, start, settings.steps, settings.optimiser, settings.lr)
    with torch.no_grad():
        match = loss(x).view(settings.restarts, targets).nan_to_num(nan=float("inf"))
    best = match.argmin(0)
    rows = torch.arange(targets)
    return x.view(settings.restarts, targets, width)[best, rows], match[best, rows]


def _with_variation(loss: Loss, weight: float, image: Sequence[int]) -> Loss:
    """The match plus weight · mean |∇x| of every picture [C, H, W] a row begins with."""
    pixels = 1
    for n in image:
        pixels *= n

    def objective(x: Tensor) -> Tensor:
        many = x.shape[1] // pixels
        pictures = x[:, : many * pixels].reshape(len(x), many, *image)
        down = (pictures[..., 1:, :] - pictures[..., :-1, :]).abs().flatten(1).mean(1)
        along = (pictures[..., :, 1:] - pictures[..., :, :-1]).abs().flatten(1).mean(1)
        return loss(x) + weight * (down + along)

    return objective


def _mean_loss(model: nn.Module, kind: str) -> Callable[[Parameters, Tensor, Tensor], Tensor]:
    def value(p: Parameters, x: Tensor, Y: Tensor) -> Tensor:
        return per_sample(kind, call_with(model, p, x), Y).mean()

    return value
