"""The flat weight vector: which parameters train, in what order, and how a vector becomes a network again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ntkfl.errors import ModelError


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters with `requires_grad`, shared ones once, in `named_parameters()` order: the columns of a Jacobian."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no trainable parameter: at least one must have requires_grad=True"
        )
    if any(not p.is_floating_point() for p in found.values()):
        raise ModelError(f"{type(model).__name__} has complex or integer trainable parameters: only real ones evolve")
    return found


def column_slices(parameters: Mapping[str, Tensor]) -> dict[str, slice]:
    """Where each parameter lies in the flat vector."""
    slices: dict[str, slice] = {}
    start = 0
    for name, p in parameters.items():
        slices[name] = slice(start, start + p.numel())
        start += p.numel()
    return slices


def with_values(model: nn.Module, values: Mapping[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """The model with these in place of its parameters of those names, as a function of inputs.

    `functional_call`, which would leave a model that holds one module under two names with a plain tensor in place of
    the parameter: each module is told its own here, so that nothing is replaced twice. Tied weights stay tied.
    """
    names = {id(p): name for name, p in model.named_parameters() if name in values}
    whole = {
        f"{module}.{role}" if module else role: values[names[id(p)]]
        for module, each in model.named_modules()
        for role, p in each.named_parameters(recurse=False, remove_duplicate=False)
        if id(p) in names
    }

    def outputs(x: Tensor) -> Tensor:
        found: Tensor = functional_call(model, whole, (x,), tie_weights=False)
        return found

    return outputs


def flatten(model: nn.Module) -> Tensor:
    """The trainable weights as one detached vector [d]."""
    return torch.cat([p.detach().reshape(-1) for p in trainable(model).values()])


def unflatten(model: nn.Module, weights: Tensor) -> dict[str, Tensor]:
    """Views of `weights` [d] by parameter name and shape."""
    parameters = trainable(model)
    total = sum(p.numel() for p in parameters.values())
    if weights.shape != (total,):
        raise ModelError(
            f"{type(model).__name__} has {total} trainable weights, not a vector of shape {list(weights.shape)}"
        )
    return {name: weights[s].view(parameters[name].shape) for name, s in column_slices(parameters).items()}


def load_flat(model: nn.Module, weights: Tensor) -> None:
    """Write `weights` [d] into the model's parameters, in place."""
    values = unflatten(model, weights)
    with torch.no_grad():
        for name, p in trainable(model).items():
            p.copy_(values[name])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside the block; every submodule's own flag is put back afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def eager(model: nn.Module) -> Iterator[nn.Module]:
    """The model without `torch.compile`, of itself or of a part: what is compiled cannot be told other weights, nor be
    differentiated sample by sample, and says nothing. Parameters are the model's own, which is put back afterwards.
    """
    parts = [(module, name, part) for module in model.modules() for name, part in module._modules.items()]
    wrapped = [(module, name, part) for module, name, part in parts if part is not None and _original(part) is not part]
    calls = [(module, own) for module in model.modules() if (own := module._compiled_call_impl) is not None]
    for module, name, part in wrapped:
        module._modules[name] = _original(part)
    for module, _ in calls:
        module._compiled_call_impl = None
    try:
        yield _original(model)
    finally:
        for module, name, part in wrapped:
            module._modules[name] = part
        for module, own in calls:
            module._compiled_call_impl = own


@contextmanager
def full_precision() -> Iterator[None]:
    """No autocast of the caller's inside the block: it would round what is computed there to its own type."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def refuses_autocast(model: nn.Module) -> Iterator[None]:
    """`ModelError` where a part of the model runs under an autocast of the model's own: what it gives is rounded to
    another type than the weights', and derivatives of it are not those of the function that the weights make.
    """

    def check(module: nn.Module, inputs: object) -> None:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise ModelError(
                f"the model runs {type(module).__name__} under torch.autocast in its forward: take that out, as "
                "everything here is computed in the weights' own type"
            )

    handles = [module.register_forward_pre_hook(check) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _original(model: nn.Module) -> nn.Module:
    """What `torch.compile` made this of, or itself; asked by the name, as the class comes with a slow import."""
    while type(model).__name__ == "OptimizedModule":
        model = model._modules["_orig_mod"]  # type: ignore[assignment]
    return model
