"""What both ends must agree on of a network beside the weights in a round's messages."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ntkfl.errors import ModelError
from ntkfl.methods import Method
from ntkfl.methods.base import kinds_of
from ntkfl.methods.task import statistics
from ntkfl.privacy.settings import Privacy
from ntkfl.tangent.parameters import trainable


def needs_shuffler(privacy: Privacy) -> bool:
    """Whether replies go past the server, or inputs are projected by what the key server alone tells clients."""
    return privacy.shuffle or privacy.secure_sum or privacy.projected_dim is not None


def frozen(model: nn.Module, method: Method) -> dict[str, Tensor]:
    """Weights and buffers that no round changes, by their names in the state dict: they do not travel every round.

    Running statistics of batch normalisation are among them unless the method averages them. A count of batches is not:
    nothing depends on it.
    """
    moving = {id(p) for p in trainable(model).values()}
    if "update" in kinds_of(method):
        moving |= {id(buffer) for buffer in statistics(model).values()}
    own = model.state_dict(keep_vars=True)
    return {n: t.detach() for n, t in own.items() if id(t) not in moving and not n.endswith("num_batches_tracked")}


def digest(model: nn.Module, method: Method) -> str:
    """SHA-256 of the names and shapes of what trains, and of all of what does not."""
    found = hashlib.sha256("".join(f"{name} {list(p.shape)};" for name, p in trainable(model).items()).encode())
    for name, value in frozen(model, method).items():
        found.update(f"{name} {value.dtype} {list(value.shape)};".encode())
        found.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def load(model: nn.Module, tensors: Mapping[str, Tensor], strict: bool, whose: str) -> None:
    """Write tensors into the model's state; `ModelError` in torch's words where they do not fit."""
    try:
        model.load_state_dict(dict(tensors), strict=strict)
    except RuntimeError as error:
        raise ModelError(f"{whose} does not fit the model: {' '.join(str(error).split()):.300}") from None


@torch.no_grad()
def outputs_of(model: nn.Module, x: Tensor) -> int:
    """The number of outputs for samples x [n, …]; `ModelError` where the model does not take them."""
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
