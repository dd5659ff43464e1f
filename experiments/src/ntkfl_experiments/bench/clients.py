"""What a client's sums of gradient and curvature cost, in gradient passes over the same samples: processor time of one
thread. With more threads a gradient pass gains more from them (its convolutions are larger), and the ratios are higher.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ntkfl import models
from ntkfl.tangent import curvature_sums, plan_jacobian
from ntkfl.tangent.losses import targets
from ntkfl_experiments.bench.timing import BenchRow, Setting, race
from ntkfl_experiments.networks import transformer
from ntkfl_experiments.rivals.models import lenet

_BATCH = 200
_Build = Callable[[tuple[int, ...], int], nn.Module]
# By name: how a network is built for so many classes, the shape of a sample, and how many samples a client has.
NETWORKS: dict[str, tuple[_Build, tuple[int, ...], int]] = {
    "perceptron": (lambda shape, classes: models.mlp(784, 100, classes), (784,), 2000),
    "LeNet": (lenet, (3, 32, 32), 1000),
    "CNN": (models.cnn, (1, 28, 28), 1000),
    "ResNet, GroupNorm": (models.resnet, (3, 32, 32), 200),
    "transformer": (transformer, (28, 28), 500),
}
CLASSES = (10, 100, 1000)


def clients(setting: Setting) -> list[BenchRow]:
    """A client's sums of gradient and curvature, with one random vector a sample (`fisher = "mc"`)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_row(name, classes, setting) for name in NETWORKS for classes in CLASSES[: 1 if setting.quick else 3]]
    finally:
        torch.set_num_threads(threads)


def _row(name: str, classes: int, setting: Setting) -> BenchRow:
    build, shape, samples = NETWORKS[name]
    count = 4 if setting.quick else samples
    torch.manual_seed(0)
    model = build(shape, classes).to(setting.device)
    x, y = torch.randn(count, *shape, device=setting.device), torch.randint(classes, (count,), device=setting.device)
    Y, plan = targets(y, classes, "ce"), plan_jacobian(model, x[:2])

    def gradient() -> None:
        for inputs, labels in zip(torch.split(x, _BATCH), torch.split(y, _BATCH), strict=True):
            model.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]

    ways = {"sums": lambda: curvature_sums(model, x, Y, "ce", plan, fisher="mc"), "gradient": gradient}
    sums = race(ways, 5, setting, time.process_time if setting.device.type == "cpu" else time.perf_counter)
    passes = sums["sums"].seconds / sums["gradient"].seconds
    note = f"{passes:.2f} gradient passes, {count} samples"
    return BenchRow(f"{name}, {classes} classes", sums["sums"].seconds, note=note, details={"passes": passes})
