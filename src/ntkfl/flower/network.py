"""What both ends must agree on of a network beside its trained weights: their layout, and whatever does not train."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ntkfl.errors import ModelError
from ntkfl.methods import Method
from ntkfl.methods.batchnorm import statistics
from ntkfl.tangent.parameters import trainable


def layout(model: nn.Module) -> str:
    """SHA-256 of the names and shapes of what trains: networks with another one cannot exchange weights."""
    names = [f"{name} {list(p.shape)}" for name, p in trainable(model).items()]
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def frozen(model: nn.Module, method: Method) -> dict[str, Tensor]:
    """Weights and buffers that no round changes, by their names in the state dict: they do not travel with every round.

    Running statistics of batch normalisation are among them unless the method averages them. A count of batches is not:
    nothing depends on it.
    """
    moving = {id(p) for p in trainable(model).values()}
    if method.trains_locally:
        moving |= {id(buffer) for buffer in statistics(model).values()}
    own = model.state_dict(keep_vars=True)
    return {n: t.detach() for n, t in own.items() if id(t) not in moving and not n.endswith("num_batches_tracked")}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and values."""
    found = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        found.update(f"{name} {value.dtype} {list(value.shape)};".encode())
        found.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def load(model: nn.Module, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], whose: str) -> None:
    """Write tensors into the model; `ModelError` where names or shapes are not those of `expected`."""
    for what, names in (("lack", expected.keys() - tensors.keys()), ("have", tensors.keys() - expected.keys())):
        if names:
            also = "" if what == "lack" else ", which the model has not"
            raise ModelError(f"{whose} {what} {sorted(names)[0]!r}{also}: both must be of the same network")
    for name, own in expected.items():
        if tensors[name].shape != own.shape:
            raise ModelError(
                f"{whose} have {name!r} of shape {list(tensors[name].shape)}; the model's has {list(own.shape)}"
            )
    model.load_state_dict(dict(tensors), strict=False)


@torch.no_grad()
def outputs_of(model: nn.Module, x: Tensor) -> int:
    """The number of outputs for one sample x [1, …]; `ModelError` where the model cannot take it."""
    was = model.training
    try:
        f = model.eval()(x)
    except Exception as error:  # whatever a user's model raises
        reason = str(error).split("\n")[0]
        raise ModelError(f"the model fails on inputs of shape {list(x.shape[1:])}: {reason}") from error
    finally:
        model.train(was)
    if not isinstance(f, Tensor) or f.ndim != 2 or len(f) != len(x):
        raise ModelError(f"the model must give one row of outputs a sample, not {list(getattr(f, 'shape', []))}")
    return f.shape[1]
