"""Claims the paper makes in passing, each with a number: the search over t, a client's work, a client's upload."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from ntkfl.methods import NTKFL, FedAvg
from ntkfl.methods.base import ClientRound, Method, Task
from ntkfl.models import cnn, mlp
from ntkfl.privacy.randomness import Randomness
from ntkfl.report.curves import COLOURS
from ntkfl.tangent import evolve, jacobian
from ntkfl.tangent.parameters import flatten
from ntkfl.wire import Message
from ntkfl_experiments.bench.inputs import fashion
from ntkfl_experiments.bench.race import race
from ntkfl_experiments.bench.rows import Setting
from ntkfl_experiments.paper.item import Context, Item, ItemResult, Verdict

CANDIDATES = (1, 2, 5, 10, 20, 40)
SENT = (10, 25, 50, 100)  # samples of an upload: dense, 100 are 318 MB
UPLOADS = {
    "Jacobian, dense": NTKFL(codec="dense"),
    "Jacobian, factored": NTKFL(codec="factored"),
    "Jacobian, top 3 %, 8 bit": NTKFL(sparsity=0.97, values="8bit"),
    "weights (FedAvg)": FedAvg(local_steps=1),
}


def claims(context: Context) -> ItemResult:
    samples = 500 if context.quick else 4000
    device = context.device or "cpu"
    searching = context.cells("the search over t", [{"samples": samples, "device": device}], search_times)[0]
    networks: list[dict[str, Any]] = [{"network": n, "samples": 200, "device": device} for n in ("mlp", "cnn")]
    working = context.cells("a client's work", networks, client_time)
    sizes = [{"samples": n} for n in SENT]
    sending = context.cells("a client's upload", sizes, upload_bytes)
    slope = growth(CANDIDATES, searching)
    slopes = {name: growth([s["samples"] for s in sizes], [sent[name] for sent in sending]) for name in UPLOADS}
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    axes = figure.subplots(1, 3)
    _draw_search(axes[0], searching)
    _draw_work(axes[1], working)
    _draw_uploads(axes[2], [s["samples"] for s in sizes], sending)
    data = {
        "search_seconds": dict(zip(map(str, CANDIDATES), searching, strict=True)),
        "client_seconds": {key["network"]: work for key, work in zip(networks, working, strict=True)},
        "upload_bytes": {str(key["samples"]): sent for key, sent in zip(sizes, sending, strict=True)},
        "upload_slopes": slopes,
    }
    d, full = 79510, sending[-1]
    findings = [
        Verdict(
            "the search over Ψ candidates takes O(Ψ) time",
            "O(Ψ)",
            f"{CANDIDATES[-1]} candidates take {searching[-1] / searching[0]:.1f} times as long as one "
            f"(power {slope:.2f})",
            slope <= 1.1,
            "all candidates come of one integration to the longest t, so that the first costs most",
        ),
        *(
            Verdict(
                f"a Jacobian costs a client no more than a gradient ({key['network'].upper()}, 200 samples)",
                "no additional client computational overhead",
                f"factored {work['factored'] / work['gradient']:.1f}, dense {work['dense'] / work['gradient']:.0f} "
                "times one gradient of the mean loss",
                work["factored"] <= 1.5 * work["gradient"],
                f"a gradient takes {1e3 * work['gradient']:.1f} ms here; judged by the factored form within 1.5 times",
            )
            for key, work in zip(networks, working, strict=True)
        ),
        Verdict(
            "NTK-FL's uplink is O(N_m d2 d) against O(d) for FedAvg",
            "O(N_m d2 d) against O(d)",
            f"bytes grow with N_m by the power {slopes['Jacobian, dense']:.2f} (dense) against "
            f"{slopes['weights (FedAvg)']:.2f}; {SENT[-1]} samples: "
            f"{full['Jacobian, dense'] / (SENT[-1] * 10 * d * 4):.3f} "
            "times N_m d2 d float32 numbers",
            abs(slopes["Jacobian, dense"] - 1) < 0.05 and abs(slopes["weights (FedAvg)"]) < 0.05,
            f"factored, the same numbers take {full['Jacobian, dense'] / full['Jacobian, factored']:.0f} times less: "
            f"{full['Jacobian, factored'] / 2**20:.2f} MiB beside FedAvg's {full['weights (FedAvg)'] / 2**20:.2f}",
        ),
    ]
    settings = {"samples": samples, "network": "784-100-10 perceptron; CNN of ntkfl.models", "device": device}
    return ItemResult(settings, [0], data, findings, figure, ["sizes of batches and networks timed"])


def search_times(key: Mapping[str, Any]) -> list[float]:
    """Seconds of a server update with so many candidates t, evenly up to 2000 at η = 0.01."""
    model, x, y = _problem("mlp", key["samples"], key["device"])
    J = jacobian(model, x)
    with torch.no_grad():
        f0 = model(x)

    def update(candidates: int) -> Tensor:
        steps = [2000 * (i + 1) / candidates for i in range(candidates)]
        return evolve(J, f0, y, 0.01, steps, kernel="full", rtol=1e-3).deltas()

    ways = {str(c): partial(update, c) for c in CANDIDATES}
    timed = race(ways, turns=3, setting=Setting(device=torch.device(key["device"])))
    return [timed[name].seconds for name in ways]


def client_time(key: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a gradient of the mean loss, and of Jacobians in both forms, for one client."""
    model, x, y = _problem(key["network"], key["samples"], key["device"])
    task, start = Task(model, 10, "ce"), flatten(model)

    def gradient() -> tuple[Tensor, ...]:
        return torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))

    few = x[:20]  # a dense Jacobian of all would be 636 MB: of a tenth, and times ten
    ways = {
        "gradient": gradient,
        "factored": lambda: task.jacobian(start, x, "factored"),
        "dense": lambda: task.jacobian(start, few, "dense"),
    }
    timed = race(ways, turns=5, setting=Setting(device=torch.device(key["device"])))
    scale = {"dense": len(x) / len(few)}
    return {name: timing.seconds * scale.get(name, 1.0) for name, timing in timed.items()}


def upload_bytes(key: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of a client's encoded upload by each method, for so many samples."""
    model, x, y = _problem("mlp", key["samples"], "cpu")
    task = Task(model, 10, "ce")
    return {name: _sent(method, task, x, y) for name, method in UPLOADS.items()}


def _sent(method: Method, task: Task, x: Tensor, y: Tensor) -> int:
    question = Message("weights", 1, {"weights": task.like})
    (answer,) = method.answer(task, question, [ClientRound(0, x, y, Randomness.simulated(0))])
    return len(answer.encode())


def _problem(network: str, samples: int, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    x, y, _ = fashion(samples)
    torch.manual_seed(0)
    if network == "cnn":
        return cnn((1, 28, 28), 10).to(device), x.view(-1, 1, 28, 28).to(device), y.to(device)
    return mlp(784, 100, 10).to(device), x.to(device), y.to(device)


def growth(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The power of `sizes` that `values` grow with: least squares of the logarithms."""
    xs, ys = [math.log(s) for s in sizes], [math.log(v) for v in values]
    return statistics.linear_regression(xs, ys).slope


def _draw_search(axis: Axes, seconds: Sequence[float]) -> None:
    axis.plot(CANDIDATES, seconds, "o-", color=COLOURS[0], label="measured")
    axis.plot(CANDIDATES, [seconds[0] * c for c in CANDIDATES], ":", color="#777777", label="Ψ times the first")
    axis.set(
        xscale="log", yscale="log", xlabel="candidates Ψ", ylabel="seconds of a server update", title="search over t"
    )
    axis.legend(frameon=False)


def _draw_work(axis: Axes, working: Sequence[Mapping[str, float]]) -> None:
    for i, way in enumerate(("gradient", "factored", "dense")):
        places = [j + 0.27 * (i - 1) for j in range(len(working))]
        axis.bar(places, [1e3 * work[way] for work in working], 0.25, color=COLOURS[i], label=way)
    axis.set_xticks(range(len(working)), ["MLP", "CNN"])
    axis.set(yscale="log", ylabel="milliseconds, 200 samples", title="a client's work")
    axis.legend(frameon=False)


def _draw_uploads(axis: Axes, samples: Sequence[int], sending: Sequence[Mapping[str, int]]) -> None:
    for i, name in enumerate(UPLOADS):
        axis.plot(samples, [sent[name] / 2**20 for sent in sending], "o-", color=COLOURS[i], label=name)
    axis.set(xscale="log", yscale="log", xlabel="samples of a client", ylabel="MiB sent", title="a client's upload")
    axis.set_xticks(samples, [str(n) for n in samples], minor=False)
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8)


ITEMS = (Item("claims", "what the text claims of time, work and bytes", claims),)
