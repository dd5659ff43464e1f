"""The paper's Figure 8: how like the original a reconstruction is, by how much of the Jacobian was left out.

The paper's appendix attacks one picture by Deep Leakage from Gradients and names sparsity and SSIM, no more: not the
network, the optimiser, its starts or steps, or whether the attacker knows that entries were left out. Here: the paper's
784-100-10 perceptron, at Kaiming initialisation and trained, and a small CNN; pictures of Fashion-MNIST, top-k rows as
CP-NTK-FL sends them, values as float32, decoded from their message; L-BFGS from Gaussian noise, the best match of
several starts. Three attackers: one who takes what was left out for zeros, one who matches what was sent, and the
closed form, which a convolution does not have.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

from ntkfl.audit.analytic import gaussian_prior, invert
from ntkfl.audit.finding import guesses, ssim
from ntkfl.data import load
from ntkfl.federation.config import ModelConfig, build_network
from ntkfl.methods.ntk_fl import TangentRows
from ntkfl.methods.task import Task
from ntkfl.privacy.settings import Privacy
from ntkfl.wire import Message
from ntkfl_experiments.paper.deep_leakage import Settings, match_jacobian, reconstruct
from ntkfl_experiments.paper.item import Beside, Context, Findings, Item, ItemResult, Verdict, crossed
from ntkfl_experiments.paper.settings import QUICK_CHOICE

PAPER = {0.5: 0.65, 0.6: 0.47, 0.7: 0.35, 0.8: 0.23, 0.9: 0.06}
BEYOND = (0.97, 0.99)  # the sparsities CP-NTK-FL runs at
ATTACKS = ("zeros", "sent", "analytic")
PERCEPTRON = "784-100-10"
SETTINGS = ((PERCEPTRON, 0), (PERCEPTRON, 300), ("cnn", 0), ("cnn", 300))  # network, steps it was trained for
NAMES = {
    "zeros": "deep leakage, the rest taken for zeros",
    "sent": "deep leakage on what was sent",
    "analytic": "analytic inversion",
}


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, batch: int = 200, lr: float = 0.1) -> None:
    """`steps` of plain descent on batches in the order given."""
    optimiser = torch.optim.SGD(model.parameters(), lr)
    for step in range(steps):
        rows = torch.arange(step * batch, (step + 1) * batch) % len(y)
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def attacked(key: Mapping[str, Any]) -> dict[str, Any]:
    """Three attacks at one sparsity on the first `images` training pictures, at the weights `seed` gives, after
    `trained` steps on others: SSIM of every picture, what was drawn of the first, its original, and what the
    mean picture of each label would score.
    """
    network, trained = key.get("network", PERCEPTRON), key.get("trained", 0)
    images, seed, sparsity = key["images"], key["seed"], key["sparsity"]
    settings = Settings(steps=key["steps"], restarts=key["restarts"], seed=seed)
    dataset = load("fashion-mnist")
    x, y = dataset.rows.take(torch.arange(images))
    public = dataset.test_rows.take()
    kind = ModelConfig(hidden=(100,)) if network == PERCEPTRON else ModelConfig(name=network)
    model = build_network(kind, tuple(x.shape[1:]), dataset.output_dim, seed)
    train(model, *dataset.rows.take(torch.arange(images, images + 20_000 if trained else images)), trained)
    task = Task(model, dataset.output_dim, "ce", privacy=Privacy(sparsity=sparsity))
    sent = TangentRows.of(task, task.like, x, y).message(1).encode()
    J = TangentRows.parse(Message.decode(sent), task).J  # as the aggregator has it
    dense, mean, std = J.dense(), dataset.rows.mean[0], dataset.rows.std[0]

    def pictures(flat: Tensor) -> Tensor:
        return (flat.view(-1, *x.shape[1:]) * std + mean).clamp(0, 1)

    drawn = {
        attack: pictures(reconstruct(match_jacobian(model, x.shape[1:], dense, attack), images, x[0].numel(), settings))
        for attack in ("zeros", "sent")
    }
    found = invert(Task(model, dataset.output_dim, "ce").at(task.like), J, gaussian_prior(public[0]))
    if found is not None:
        drawn["analytic"] = pictures(found.x)
    originals = pictures(x)
    points = [
        {
            "sparsity": sparsity,
            "attack": attack,
            "ssim": ssim(originals, seen).tolist(),
            "picture": _rows(seen[0]),
        }
        for attack, seen in drawn.items()
    ]
    guess = ssim(originals, pictures(guesses(public, y))).tolist()
    return {"points": points, "original": _rows(originals[0]), "guess": guess}


def _rows(picture: Tensor) -> list[list[float]]:
    """[1, 28, 28] as plain numbers, fine enough for a screen."""
    return [[round(v, 3) for v in row] for row in picture[0].tolist()]


def monotone(points: Sequence[Mapping[str, Any]], attack: str) -> bool:
    """Whether likeness falls with sparsity, within two standard errors of each step's difference."""
    own = sorted((p for p in points if p["attack"] == attack), key=lambda p: float(p["sparsity"]))
    scores = [(statistics.fmean(p["ssim"]), statistics.stdev(p["ssim"]) / math.sqrt(len(p["ssim"]))) for p in own]
    return all(b <= a + 2 * math.hypot(off_a, off_b) for (a, off_a), (b, off_b) in itertools.pairwise(scores))


def summed_up(points: Sequence[Mapping[str, Any]], guess: Sequence[float]) -> dict[str, Any]:
    """What is kept of the attacks, without their pictures."""
    kept = [
        {
            "sparsity": p["sparsity"],
            "attack": p["attack"],
            "mean": statistics.fmean(p["ssim"]),
            "spread": statistics.stdev(p["ssim"]),
            "ssim": [round(v, 5) for v in p["ssim"]],
        }
        for p in points
    ]
    trend = {attack: monotone(points, attack) for attack in ATTACKS}
    return {"paper": {str(s): v for s, v in PAPER.items()}, "guess": statistics.fmean(guess), "monotone": trend,
            "points": kept}  # fmt: skip


def figure(points: Sequence[Mapping[str, Any]], original: list[list[float]], guess: float) -> Figure:
    """One picture by sparsity and attack, and the curves with the paper's."""
    at = {(p["sparsity"], p["attack"]): p for p in points}
    sparsities = sorted({s for s, _ in at})
    drawn = Figure(figsize=(12.5, 5.2), layout="constrained", dpi=110)
    FigureCanvasAgg(drawn)
    halves: Any = drawn.subfigures(1, 2, width_ratios=(1.25, 1))
    grid = halves[0].subplots(len(ATTACKS), 1 + len(sparsities))
    for r, attack in enumerate(ATTACKS):
        own = [at[s, attack] for s in sparsities]
        cells = [
            (original, "original", ""),
            *((p["picture"], f"{p['sparsity']:.0%}", f"{p['ssim'][0]:.2f}") for p in own),
        ]
        for axis, (picture, title, score) in zip(grid[r], cells, strict=True):
            axis.imshow(picture, cmap="gray", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_title(title if r == 0 else "", fontsize=9)
            axis.set_xlabel(score, fontsize=8.5)
        grid[r][0].set_ylabel(NAMES[attack].replace(", ", ",\n").replace(" on ", "\non "), fontsize=8.5)
    axis = halves[1].subplots()
    axis.plot([100 * s for s in PAPER], list(PAPER.values()), "k--o", label="paper (one picture)", markersize=4)
    for attack, colour in zip(ATTACKS, ("#E69F00", "#0072B2", "#D55E00"), strict=True):
        scores = [at[s, attack]["ssim"] for s in sparsities]
        x, y, spread = (
            [100 * s for s in sparsities],
            list(map(statistics.fmean, scores)),
            list(map(statistics.stdev, scores)),
        )
        axis.errorbar(x, y, yerr=spread, fmt="-o", color=colour, label=NAMES[attack], markersize=4, capsize=2)
    axis.axhline(guess, color="#777777", linestyle=":", label="mean picture of the label")
    axis.set_xlabel("entries of the Jacobian left out, %")
    axis.set_ylabel("SSIM of the reconstruction")
    axis.set_ylim(0, 1.08)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8.5, loc="lower left")
    return drawn


def run(context: Context) -> ItemResult:
    """Three attackers on top-k rows as they go over the wire; a sparsity at a time, so that each is kept."""
    images, steps, restarts = (4, 40, 1) if context.quick else (12, 80, 2)
    sparsities = (0.5, 0.9, 0.97) if context.quick else (*PAPER, *BEYOND)
    common = {"images": images, "steps": steps, "restarts": restarts, "seed": 0}
    elsewhere = [
        {"sparsity": s, **common, "images": min(images, 4), "network": network, "trained": trained}
        for network, trained in (SETTINGS[:2] if context.quick else SETTINGS)[1:]
        for s in (0.5, 0.9)
    ]
    answers = context.cells("attacks by sparsity", crossed({"sparsity": sparsities}, **common), attacked)
    others = context.cells("attacks on other networks and weights", elsewhere, attacked)
    points, guess = [p for answer in answers for p in answer["points"]], answers[0]["guess"]
    more = [
        {name: (key | p)[name] for name in ("network", "trained", "sparsity", "attack")}
        | {"mean": statistics.fmean(p["ssim"]), "guess": statistics.fmean(answer["guess"])}
        for key, answer in zip(elsewhere, others, strict=True)
        for p in answer["points"]
    ]
    notes = {"network": "784-100-10, Kaiming", "images": images, "steps": steps, "restarts": restarts}
    choices = [
        "the paper names sparsity and SSIM, no more: network, optimiser, starts and steps are ours",
        "pictures are the first training images of Fashion-MNIST; SSIM is their mean",
        "trained: 300 steps of 0.1 on batches of 200 other pictures; the CNN is that of `ntkfl.models`",
        *([QUICK_CHOICE] if context.quick else []),
    ]
    data = {"settings": notes, **summed_up(points, guess), "elsewhere": more}
    return ItemResult(notes, [0], data, figure(points, answers[0]["original"], statistics.fmean(guess)), choices)


def judge(data: Mapping[str, Any]) -> Findings:
    """By the best attacker at each sparsity that the paper names: a defence is as good as what beats it."""
    mean = {(p["sparsity"], p["attack"]): p["mean"] for p in data["points"]}
    sparsities = sorted({s for s, _ in mean})
    shared = [s for s in sparsities if s in PAPER]
    best = {s: max(mean[s, attack] for attack in ATTACKS) for s in shared}
    highest, most, guess = sparsities[-1], shared[-1], data["guess"]
    others = _elsewhere(data)
    safe = "".join(
        f"; {where}: {found[most]:.2f}, guess {own:.2f}"
        for where, (found, own) in others.items()
        if most in found and found[most] <= own
    )
    return [
        Verdict(
            "sparsification is effective against reconstruction",
            "“empirically effective against the data reconstruction attack”: SSIM "
            + ", ".join(f"{PAPER[s]:.2f} at {s:.0%}" for s in shared),
            "best attack: " + ", ".join(f"{v:.2f} at {s:.0%}" for s, v in best.items()),
            best[most] <= guess,
            f"effective is no better than a guess by label, {guess:.2f}; judged on {PERCEPTRON}, as the paper does not "
            f"state its network{safe}",
            f"SSIM {best[most]:.2f} at {most:.0%}, guess {guess:.2f}{safe}",
        ),
        Verdict(
            "a reconstruction is closer to the original the less is left out",
            "“when the sparsity decreases, the reconstructions are closer to original images”",
            "; ".join(f"{a}: {'yes' if data['monotone'][a] else 'no'}" for a in ATTACKS),
            all(data["monotone"][a] for a in ATTACKS),
            short=f"for {sum(map(bool, data['monotone'].values()))} of {len(ATTACKS)} attacks",
        ),
    ], [
        Beside(f"analytic inversion at {highest:.0%}", f"SSIM {mean[highest, 'analytic']:.2f}"),
        *(
            Beside(
                f"best attack on {where}",
                "SSIM " + ", ".join(f"{v:.2f} at {s:.0%}" for s, v in found.items()) + f"; a guess {own:.2f}",
            )
            for where, (found, own) in others.items()
        ),
    ]


def _elsewhere(data: Mapping[str, Any]) -> dict[str, tuple[dict[float, float], float]]:
    """By network and weights: the best attack at each sparsity, and what a guess scores on the same pictures."""
    found: dict[str, tuple[dict[float, float], float]] = {}
    for p in data.get("elsewhere", ()):
        state = f"trained for {p['trained']} steps" if p["trained"] else "as initialised"
        best, _ = found.setdefault(f"{p['network']}, {state}", ({}, p["guess"]))
        best[p["sparsity"]] = max(best.get(p["sparsity"], 0.0), p["mean"])
    return found


FIGURE8 = Item("fig8", "reconstruction of inputs against sparsity of the Jacobian", run, judge)
