"""Kernels of PyTorch networks by this package and by other libraries, each in a process of its own: time and memory.

Two tasks, each by every library's own best way: the trace kernel (`kernel`), and products with the full kernel
(`products`), for which no library has to store a derivative.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from ntkfl.models import cnn, mlp, resnet
from ntkfl.tangent import jacobian, plan_jacobian
from ntkfl.tangent.passes import JacobianPlan
from ntkfl_experiments.bench.dense import DenseWay
from ntkfl_experiments.bench.memory import peak_bytes, reset_peak
from ntkfl_experiments.bench.timing import BenchRow, Setting, synthetic
from ntkfl_experiments.networks import transformer

NETWORKS = ("MLP", "CNN", "ResNet", "wide ResNet", "transformer", "wide transformer")
PRODUCTS = 50
_OUTPUTS, _ENOUGH = 10, 2.0  # seconds: a shorter call is repeated and the best one counts
_SAMPLES = dict(zip(NETWORKS, (200, 100, 16, 8, 50, 20), strict=True))
_ROUNDS = 4
_TWO_PASSES = "two passes over the network per product"
_LIMITS = {
    ("kernel", "torch.func"): "stores every derivative",
    ("kernel", "BackPACK"): "chains of layers that it knows",
    ("kernel", "curvlinops"): "no sample-wise rows: a product over the batch per output and sample",
    ("kernel", "neural-tangents"): "networks in JAX",
    ("products", "torch.func"): _TWO_PASSES,
    ("products", "curvlinops"): _TWO_PASSES,
    ("products", "JAX"): "networks in JAX",
}


def jacobians(setting: Setting) -> list[BenchRow]:
    """Trace kernel, and products with the full kernel, beside torch.func, BackPACK, curvlinops, neural-tangents.

    Processor time, the Jacobian included. Each in a process of its own, with as many threads as PyTorch takes; a
    library that is not installed has no row, and the note of ours names it.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for task in TASKS:
            for name in NETWORKS:
                samples = 4 if setting.quick else _SAMPLES[name]
                found = _rounds(task, name, samples, setting.quick, Path(folder))
                refusals = [f"{way} cannot: {answer['cannot']}" for way, answer in found.items() if "cannot" in answer]
                missing = ", ".join(way for way, answer in found.items() if "missing" in answer)
                about = "; ".join([f"N={samples:,}", *refusals, *([f"not installed: {missing}"] if missing else [])])
                timed = {way: answer for way, answer in found.items() if "seconds" in answer}
                rows += [_row(task, name, way, own, found["ntkfl"], about) for way, own in timed.items()]
    return rows


def _rounds(task: str, name: str, samples: int, quick: bool, folder: Path) -> dict[str, dict[str, Any]]:
    """The best of several rounds, each library in turn, so that other work on the machine hits all of them alike."""
    found: dict[str, dict[str, Any]] = {}
    for number in range(1 if quick else _ROUNDS):
        for way in TASKS[task]:
            # One that is far behind would take most of the time, and no round brings it back.
            if number and ("seconds" not in found[way] or found[way]["seconds"] > 20 * found["ntkfl"]["seconds"]):
                continue
            answer = _in_a_process(task, way, name, samples, quick, folder / f"{way}.npy")
            if number:
                answer |= {key: min(answer[key], found[way][key]) for key in ("seconds", "added")}
            found[way] = answer
    return found


def _in_a_process(task: str, way: str, name: str, samples: int, quick: bool, target: Path) -> dict[str, Any]:
    # Not -m: the package imports this module, which would then be there twice.
    code = "from ntkfl_experiments.bench.libraries import main; main()"
    command = [sys.executable, "-c", code, task, way, name, str(samples), str(quick), str(target)]
    quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=quiet)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer | ({"result": np.load(target).astype(np.float64)} if "seconds" in answer else {})


def _row(task: str, name: str, way: str, found: dict[str, Any], mine: dict[str, Any], about: str) -> BenchRow:
    what = f"{name}: {way}" if task == "kernel" else f"{name}, {PRODUCTS} products: {way}"
    megabytes, seconds = found["added"] / 1e6, found["seconds"]
    details = {"peak_megabytes": megabytes}
    if found is mine:
        return BenchRow(what, seconds, 1.0, note=f"peak {megabytes:,.0f} MB; {about}", details=details)
    details["memory_ratio"] = found["added"] / max(mine["added"], 1.0)
    apart = float(np.linalg.norm(found["result"] - mine["result"]) / np.linalg.norm(mine["result"]))
    note = f"peak {megabytes:,.0f} MB, {details['memory_ratio']:,.3g} times ours; {_LIMITS[task, way]}"
    return BenchRow(what, seconds, seconds / mine["seconds"], apart, note, details)


def network(name: str, samples: int, quick: bool) -> tuple[nn.Module, Tensor]:
    """A network of ten outputs, and images for it. The wide ones have sixteen times the weights, or more."""
    colours, side = (3, 32) if "ResNet" in name else (1, 28)
    side = side // 2 if quick else side
    x = synthetic(samples * colours, side)[0].reshape(samples, colours, side, side)
    torch.manual_seed(0)
    shape = (colours, side, side)
    if name == "MLP":
        return mlp(side * side, 100, _OUTPUTS), x.flatten(1)
    builders: dict[str, Callable[..., nn.Module]] = {
        "CNN": cnn,
        "ResNet": resnet,
        "wide ResNet": partial(resnet, channels=(64, 128, 256)),
        "transformer": transformer,
        "wide transformer": partial(transformer, width=256, heads=8),
    }
    return builders[name](shape, _OUTPUTS).eval(), x


def ours(model: nn.Module, x: Tensor) -> Tensor:
    return jacobian(model, x, plan=_planned(model, x)).kernel()


@cache
def _planned(model: nn.Module, x: Tensor) -> JacobianPlan:
    """Made in the first call, as XLA's code is."""
    return plan_jacobian(model, x)


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
    return torch.from_numpy(np.array(_compiled(model)(x.numpy(), _jax_weights(model))))


def _jax_weights(model: nn.Module) -> list[Any]:
    # Matrices transposed here: a transpose inside the network would hide their structure from it.
    return [p.detach().T.contiguous().numpy() if p.ndim == 2 else p.detach().numpy() for p in model.parameters()]


@cache
def _compiled(model: nn.Module) -> Callable[..., Any]:
    jax, nt = import_module("jax"), import_module("neural_tangents")
    kernel = nt.empirical_ntk_fn(
        _in_jax(model), trace_axes=(-1,), vmap_axes=0, implementation=nt.NtkImplementation.STRUCTURED_DERIVATIVES
    )
    compiled: Callable[..., Any] = jax.jit(lambda inputs, weights: kernel(inputs, None, weights))
    return compiled


@cache
def _compiled_product(model: nn.Module) -> Callable[..., Any]:
    jax, f = import_module("jax"), _in_jax(model)

    def product(inputs: Any, weights: list[Any], R: Any) -> Any:
        _, back = jax.vjp(lambda w: f(w, inputs), weights)
        return jax.jvp(lambda w: f(w, inputs), (weights,), back(R))[1]

    compiled: Callable[..., Any] = jax.jit(product)
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


def products_of(apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """R of power iteration, R ← Θ R / ‖Θ R‖, [N, d2]: products that follow one another, as in any solver."""
    R = torch.ones(len(x), _OUTPUTS) + torch.arange(_OUTPUTS) / _OUTPUTS
    for _ in range(PRODUCTS):
        R = apply(R)
        R = R / R.norm()
    return R


def our_products(model: nn.Module, x: Tensor) -> Tensor:
    return products_of(jacobian(model, x, plan=_planned(model, x)).product, x)


def torch_func_products(model: nn.Module, x: Tensor) -> Tensor:
    """Nothing stored but the graph: a backward pass and one in forward mode for each product.

    `linearize` would halve the latter, and spends as much as 50 products save on tracing the network at new weights.
    """
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def outputs(values: dict[str, Tensor]) -> Tensor:
        result: Tensor = functional_call(model, values, (x,))
        return result

    with sdpa_kernel(SDPBackend.MATH):  # attention's fused kernel has no forward derivative
        back = vjp(outputs, parameters)[1]
        return products_of(lambda R: jvp(outputs, (parameters,), back(R))[1], x)


def curvlinops_products(model: nn.Module, x: Tensor) -> Tensor:
    library, parameters = import_module("curvlinops"), list(model.parameters())
    data = [(x, x.new_zeros(len(x), _OUTPUTS))]
    J, Jt = (
        getattr(library, name)(model, parameters, data, check_deterministic=False)
        for name in ("JacobianLinearOperator", "TransposedJacobianLinearOperator")
    )
    with sdpa_kernel(SDPBackend.MATH):
        return products_of(lambda R: (J @ (Jt @ R.flatten())).view(R.shape), x)


def jax_products(model: nn.Module, x: Tensor) -> Tensor:
    """The same as torch.func's, compiled by XLA."""
    product, weights, images = _compiled_product(model), _jax_weights(model), x.numpy()
    return products_of(lambda R: torch.from_numpy(np.array(product(images, weights, R.numpy()))), x)


Way = Callable[[nn.Module, Tensor], Tensor]
KERNEL_WAYS: dict[str, Way] = {
    "ntkfl": ours,
    "torch.func": torch_func,
    "BackPACK": backpack,
    "curvlinops": curvlinops,
    "neural-tangents": neural_tangents,
}
PRODUCT_WAYS: dict[str, Way] = {
    "ntkfl": our_products,
    "torch.func": torch_func_products,
    "curvlinops": curvlinops_products,
    "JAX": jax_products,
}
TASKS = {"kernel": KERNEL_WAYS, "products": PRODUCT_WAYS}


def main() -> None:
    """argv: task, way, network, samples, quick, and the file for the result.

    Prints seconds and bytes, or why there are none.
    """
    task, way, name, samples, quick, target = sys.argv[1:7]
    torch.backends.mha.set_fastpath_enabled(False)  # another fused kernel that has no derivatives
    run = TASKS[task][way]
    model, x = network(name, int(samples), quick == "True")
    device = torch.device("cpu")
    try:
        run(*network("MLP", 2, quick=True))  # libraries load
        _give_back()
        before = reset_peak(device)
        seconds, result = _timed(run, model, x)
        added, spent = peak_bytes(device) - before, seconds
        while spent < _ENOUGH:
            again, result = _timed(run, model, x)
            seconds, spent = min(seconds, again), spent + again
    except ModuleNotFoundError as error:  # any other ImportError is of a library that does not fit what is installed
        print(json.dumps({"missing": str(error)}))
        return
    except Exception as error:  # what a library cannot do it says in ways of its own
        print(json.dumps({"cannot": str(error).partition("\n")[0] or type(error).__name__}))
        return
    np.save(Path(target), result.numpy(force=True))
    print(json.dumps({"seconds": seconds, "added": added}))


def _give_back() -> None:
    """What loading freed goes back to the system, or a small task would seem to need no memory at all."""
    with suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def _timed(way: Way, model: nn.Module, x: Tensor) -> tuple[float, Tensor]:
    """Seconds of processor time over all threads, which other work on the machine hardly changes."""
    start = time.process_time()
    result = way(model, x)
    return time.process_time() - start, result
