"""Claims the paper makes in passing: the search over t, a client's work and upload, what shuffler and projection do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from ntkfl.methods import NTKFL, FedAvg
from ntkfl.methods.base import Method
from ntkfl.methods.task import ClientRound, Task
from ntkfl.models import cnn, mlp
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.settings import Privacy
from ntkfl.report import COLOURS
from ntkfl.tangent import evolve, jacobian
from ntkfl.tangent.parameters import flatten
from ntkfl.wire import Message
from ntkfl_experiments.bench.timing import Setting, fashion, race
from ntkfl_experiments.paper.axes import slope
from ntkfl_experiments.paper.curious import PAIRS, SHUFFLED, read_projected, read_shuffled
from ntkfl_experiments.paper.item import Beside, Context, Findings, Item, ItemResult, Verdict

CANDIDATES = (1, 2, 5, 10, 20, 40)
LOCAL_STEPS = 10  # τ “is often on the order of magnitude of 10” (Remark 2)
WEIGHTS = 79_510  # of the 784-100-10 network
SENT = (10, 25, 50, 100)  # samples of an upload: dense, 100 are 318 MB
UPLOADS: dict[str, tuple[Method, Privacy]] = {
    "Jacobian, dense": (NTKFL(form="dense"), Privacy()),
    "Jacobian, factored": (NTKFL(form="factored"), Privacy()),
    "Jacobian, top 3 %, 8 bit": (NTKFL(), Privacy(sparsity=0.97, values="8bit")),
    "weights (FedAvg)": (FedAvg(local_steps=1), Privacy()),
}


def claims(context: Context) -> ItemResult:
    samples = 500 if context.quick else 4000
    device = context.device or "cpu"
    searching = context.cells("the search over t", [{"samples": samples, "device": device}], search_times)[0]
    networks: list[dict[str, Any]] = [{"network": n, "samples": 200, "device": device} for n in ("mlp", "cnn")]
    working = context.cells("a client's work", networks, client_time)
    sizes = [{"samples": n} for n in SENT]
    sending = context.cells("a client's upload", sizes, upload_bytes)
    mixed = context.cells("rows after a shuffler", [{"samples": 20 if context.quick else 60, "seed": 0}], read_shuffled)
    behind = context.cells("rows behind a projection", [{"clients": 20, "seed": 0}], read_projected)
    slopes = {name: slope([s["samples"] for s in sizes], [sent[name] for sent in sending]) for name in UPLOADS}
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
        "shuffled": mixed[0],
        "projected": behind[0],
    }
    settings = {"samples": samples, "network": "784-100-10 perceptron; CNN of ntkfl.models", "device": device}
    return ItemResult(settings, [0], data, figure, ["sizes of batches and networks timed; a client of 200 samples"])


def judge(data: Mapping[str, Any]) -> Findings:
    seconds, work = list(data["search_seconds"].values()), data["client_seconds"]["mlp"]
    power = slope([float(c) for c in data["search_seconds"]], seconds)
    slopes, mixed, behind = data["upload_slopes"], data["shuffled"], data["projected"]
    most = max(data["upload_bytes"], key=int)
    full = data["upload_bytes"][most]
    ratio = {
        network: {k: v / own["gradient"] for k, v in own.items()} for network, own in data["client_seconds"].items()
    }
    return [
        Verdict(
            "the search over Ψ candidates takes O(Ψ) time",
            "“can be completed in O(Ψ) time”",
            f"{CANDIDATES[-1]} candidates take {seconds[-1] / seconds[0]:.1f} times as long as one (power {power:.2f})",
            power <= 1.1,
            short=f"{CANDIDATES[-1]} candidates take {seconds[-1] / seconds[0]:.1f} times as long as one",
        ),
        Verdict(
            "a Jacobian costs a client no more than a gradient",
            "“does not incur additional client computational overhead”",
            f"factored {ratio['mlp']['factored']:.1f}, dense {ratio['mlp']['dense']:.0f} times one gradient of the "
            "mean loss (784-100-10, 200 samples)",
            ratio["mlp"]["factored"] <= 1.5,
            "judged by the factored form, ours, within 1.5 times",
            f"{ratio['mlp']['factored']:.1f} times a gradient; dense {ratio['mlp']['dense']:.0f}",
        ),
        Verdict(
            "NTK-FL is faster than FedAvg on the client side",
            "“without locally updating weight vectors, NTK-FL is faster than FedAvg on the client side”",
            f"{1e3 * work['factored']:.1f} ms for a factored Jacobian, {1e3 * work['local']:.1f} for {LOCAL_STEPS} "
            f"local steps of FedAvg, {1e3 * work['dense']:.0f} for a dense Jacobian",
            work["factored"] < work["local"],
            "by the factored form, ours; a dense Jacobian, as the authors make it, is slower",
            f"{1e3 * work['factored']:.1f} ms against {1e3 * work['local']:.1f}; dense {1e3 * work['dense']:,.0f}",
        ),
        Verdict(
            "NTK-FL's uplink is O(N_m d2 d) against O(d) for FedAvg",
            "“an O(N_m d2 d) complexity compared to O(d) in FedAvg”",
            f"bytes grow with N_m by the power {slopes['Jacobian, dense']:.2f} (dense) against "
            f"{slopes['weights (FedAvg)']:.2f}; {most} samples: "
            f"{full['Jacobian, dense'] / (int(most) * 10 * WEIGHTS * 4):.3f} times N_m d2 d float32 numbers",
            abs(slopes["Jacobian, dense"] - 1) < 0.05 and abs(slopes["weights (FedAvg)"]) < 0.05,
            short=f"power of N_m: {slopes['Jacobian, dense']:.2f}; FedAvg's {slopes['weights (FedAvg)']:.2f}",
        ),
        Verdict(
            "shuffling makes reconstruction computationally infeasible",
            "“the reconstruction attack becomes computationally infeasible”",
            f"{mixed['samples']} shuffled rows at {SHUFFLED:.0%} sparsity, each read by itself in "
            f"{1e3 * mixed['seconds'] / mixed['samples']:.0f} ms: SSIM {mixed['ssim']:.2f}; as sent "
            f"{mixed['plain']:.2f}",
            mixed["ssim"] <= 0.5 * mixed["plain"],
            "a row is enough; its place among others plays no part (docs/audit.md has projected rows too)",
            f"SSIM {mixed['ssim']:.2f} from one shuffled row",
        ),
        Verdict(
            "shuffling ensures membership privacy",
            "“to further ensure the confidentiality and membership privacy, we introduce a shuffling server”",
            f"advantage {mixed['advantage']:.2f} of looking a record up among the shuffled rows",
            mixed["advantage"] <= 0.1,
            "an advantage of 0 is a guess, 1 is certainty",
            f"advantage {mixed['advantage']:.2f}; 0 is a guess",
        ),
        Verdict(
            "the random projection defends against reconstruction",
            "“the random projection will defend against the data reconstruction attack”",
            f"SSIM {behind['alone']:.2f} by the server alone, where a guess by label has {behind['guess']:.2f} and an "
            f"unprojected row the picture ({behind['rows']} rows, 784 to {behind['dimensions']})",
            _defended(behind["alone"], behind["guess"]),
            "no better than a guess would defend, more than half of the way to the picture would not; between them the "
            f"paper has no number. With P, which every client has, {behind['with P']:.2f} (a guess "
            f"{behind['guess beside P']:.2f}); with {PAIRS} known inputs {behind['known']:.2f}",
            f"SSIM {behind['alone']:.2f}, guess {behind['guess']:.2f}; with a client's help {behind['with P']:.2f}, "
            f"guess {behind['guess beside P']:.2f}",
        ),
    ], [
        Beside(
            "a CNN's Jacobian, in gradients of the mean loss",
            f"factored {ratio['cnn']['factored']:.1f}, dense {ratio['cnn']['dense']:.0f}",
        ),
        Beside(
            f"an upload of {most} samples, factored, against the dense one",
            f"{full['Jacobian, dense'] / full['Jacobian, factored']:.0f} times smaller: "
            f"{full['Jacobian, factored'] / 2**20:.2f} MiB beside FedAvg's {full['weights (FedAvg)'] / 2**20:.2f}",
        ),
    ]


def _defended(reached: float, guess: float) -> bool | None:
    """Of similarities to a picture, which is 1: at a guess or below, above half of the way from there, or between."""
    if reached <= guess:
        return True
    return False if reached - guess > 0.5 * (1 - guess) else None


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
    """A client's seconds for a gradient of the mean loss, Jacobians in both forms, and FedAvg's local steps."""
    model, x, y = _problem(key["network"], key["samples"], key["device"])
    task, start = Task(model, 10, "ce"), flatten(model)
    averaging = FedAvg(local_steps=LOCAL_STEPS)

    def gradient() -> tuple[Tensor, ...]:
        return torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))

    few = x[:20]  # a dense Jacobian of all would be 636 MB: of a tenth, and times ten
    ways = {
        "gradient": gradient,
        "factored": lambda: task.jacobian(start, x, "factored"),
        "dense": lambda: task.jacobian(start, few, "dense"),
        "local": lambda: averaging.answer(task, _question(task), ClientRound(0, x, y, Randomness.simulated(0))),
    }
    timed = race(ways, turns=5, setting=Setting(device=torch.device(key["device"])))
    scale = {"dense": len(x) / len(few)}
    return {name: timing.seconds * scale.get(name, 1.0) for name, timing in timed.items()}


def upload_bytes(key: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of a client's encoded upload by each method, for so many samples."""
    model, x, y = _problem("mlp", key["samples"], "cpu")
    client = ClientRound(0, x, y, Randomness.simulated(0))
    sent = {}
    for name, (method, privacy) in UPLOADS.items():
        task = Task(model, 10, "ce", privacy=privacy)
        sent[name] = len(method.answer(task, _question(task), client).message(1).encode())
    return sent


def _question(task: Task) -> Message:
    return Message("weights", 1, {"weights": task.like})


def _problem(network: str, samples: int, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    x, y, _ = fashion(samples)
    torch.manual_seed(0)
    if network == "cnn":
        return cnn((1, 28, 28), 10).to(device), x.view(-1, 1, 28, 28).to(device), y.to(device)
    return mlp(784, 100, 10).to(device), x.to(device), y.to(device)


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


CLAIMS = Item("claims", "what the text claims of time, work, bytes, shuffling and projection", claims, judge)
