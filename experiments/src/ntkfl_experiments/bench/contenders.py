"""The trace kernel of a PyTorch network by this package and by others, each in a process of its own."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ntkfl.models import cnn, mlp, resnet, transformer
from ntkfl.tangent import jacobian, plan_jacobian
from ntkfl.tangent.passes import JacobianPlan
from ntkfl_experiments.bench.dense import DenseWay
from ntkfl_experiments.bench.inputs import synthetic
from ntkfl_experiments.bench.memory import peak_bytes, reset_peak

NETWORKS = ("MLP", "CNN", "ResNet", "transformer")
_OUTPUTS, _ENOUGH = 10, 2.0  # seconds: a shorter call is repeated and the best one counts


def network(name: str, samples: int, quick: bool) -> tuple[nn.Module, Tensor]:
    """A network of ten outputs, and images for it."""
    colours, side = (3, 32) if name == "ResNet" else (1, 28)
    side = side // 2 if quick else side
    x = synthetic(samples * colours, side)[0].reshape(samples, colours, side, side)
    torch.manual_seed(0)
    shape = (colours, side, side)
    if name == "MLP":
        return mlp(side * side, 100, _OUTPUTS), x.flatten(1)
    builders: dict[str, Callable[..., nn.Module]] = {"CNN": cnn, "ResNet": resnet, "transformer": transformer}
    return builders[name](shape, _OUTPUTS).eval(), x


def ours(model: nn.Module, x: Tensor) -> Tensor:
    return jacobian(model, x, plan=_planned(model, x)).kernel()


_plans: dict[int, JacobianPlan] = {}


def _planned(model: nn.Module, x: Tensor) -> JacobianPlan:
    """Made in the first call, as XLA's code is."""
    if id(model) not in _plans:
        _plans[id(model)] = plan_jacobian(model, x)
    return _plans[id(model)]


def torch_func(model: nn.Module, x: Tensor) -> Tensor:
    """vmap(jacrev) a few rows at a time, every derivative stored."""
    way = DenseWay(model, x, _OUTPUTS)
    way.fill()
    return way.kernel()


def backpack(model: nn.Module, x: Tensor) -> Tensor:
    """`BatchGrad` of an output at a time: a tenth of the Jacobian is held, and the kernel adds up."""
    library, extensions = import_module("backpack"), import_module("backpack.extensions")
    extended = library.extend(model)
    total = x.new_zeros(len(x), len(x))
    for output in range(_OUTPUTS):
        model.zero_grad()
        with library.backpack(extensions.BatchGrad()):
            extended(x)[:, output].sum().backward()
        if not all(hasattr(p, "grad_batch") for p in model.parameters()):
            raise NotImplementedError("a layer without BatchGrad")
        for p in model.parameters():
            rows = p.grad_batch.flatten(1)  # type: ignore[attr-defined]
            total.addmm_(rows, rows.T)
    return total.div_(_OUTPUTS)


def curvlinops(model: nn.Module, x: Tensor) -> Tensor:
    """Jᵀ as a linear operator on the whole batch: a product for every output of every sample."""
    data = [(x, x.new_zeros(len(x), _OUTPUTS))]
    parameters = list(model.parameters())
    library = import_module("curvlinops")
    operator = library.TransposedJacobianLinearOperator(model, parameters, data, check_deterministic=False)
    seeds = torch.split(torch.eye(len(x) * _OUTPUTS), 50)
    rows = torch.cat([operator @ few.T for few in seeds], dim=1).T.reshape(len(x), -1)
    return rows @ rows.T / _OUTPUTS


def neural_tangents(model: nn.Module, x: Tensor) -> Tensor:
    """Structured derivatives, compiled by XLA."""
    # Matrices transposed here: a transpose inside the network would hide their structure from it.
    weights = [p.detach().T.contiguous().numpy() if p.ndim == 2 else p.detach().numpy() for p in model.parameters()]
    return torch.from_numpy(np.array(_compiled(model)(x.numpy(), weights)))


@cache
def _compiled(model: nn.Module) -> Callable[..., Any]:
    jax, nt = import_module("jax"), import_module("neural_tangents")
    kernel = nt.empirical_ntk_fn(
        _in_jax(model), trace_axes=(-1,), vmap_axes=0, implementation=nt.NtkImplementation.STRUCTURED_DERIVATIVES
    )
    compiled: Callable[..., Any] = jax.jit(lambda inputs, weights: kernel(inputs, None, weights))
    return compiled


def _in_jax(model: nn.Module) -> Callable[..., Any]:
    """The same chain of linear layers, convolutions and ReLUs in JAX; its weights in a list."""
    if not isinstance(model, nn.Sequential) or not all(
        isinstance(layer, nn.Linear | nn.Conv2d | nn.ReLU | nn.Flatten) for layer in model
    ):
        raise NotImplementedError("the network must be written again in JAX")
    jax, layers = import_module("jax"), list(model)

    def f(weights: list[Any], h: Any) -> Any:
        left = iter(weights)
        for layer in layers:
            if isinstance(layer, nn.Linear):
                h = h @ next(left) + next(left)
            elif isinstance(layer, nn.Conv2d):
                h = jax.lax.conv_general_dilated(h, next(left), layer.stride, "VALID") + next(left)[:, None, None]
            elif isinstance(layer, nn.ReLU):
                h = jax.numpy.maximum(h, 0)
            else:
                h = h.reshape(len(h), -1)
        return h

    return f


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "ntkfl": ours,
    "torch.func": torch_func,
    "BackPACK": backpack,
    "curvlinops": curvlinops,
    "neural-tangents": neural_tangents,
}


def main() -> None:
    """argv: way, network, samples, quick, where the kernel goes. Prints seconds and bytes, or why there are none."""
    way, name, samples, quick, target = sys.argv[1:6]
    model, x = network(name, int(samples), quick == "True")
    device = torch.device("cpu")
    try:
        WAYS[way](*network("MLP", 2, quick=True))  # libraries load
        before = reset_peak(device)
        seconds, kernel = _timed(WAYS[way], model, x)
        added, spent = peak_bytes(device) - before, seconds
        while spent < _ENOUGH:
            again, kernel = _timed(WAYS[way], model, x)
            seconds, spent = min(seconds, again), spent + again
    except ImportError as error:
        print(json.dumps({"missing": str(error)}))
        return
    except Exception as error:  # what a library cannot do it says in ways of its own
        print(json.dumps({"cannot": str(error).partition("\n")[0] or type(error).__name__}))
        return
    np.save(Path(target), kernel.numpy(force=True))
    print(json.dumps({"seconds": seconds, "added": added}))


def _timed(way: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, x: Tensor) -> tuple[float, Tensor]:
    """Seconds of processor time over all threads, which other work on the machine hardly changes."""
    start = time.process_time()
    kernel = way(model, x)
    return time.process_time() - start, kernel
