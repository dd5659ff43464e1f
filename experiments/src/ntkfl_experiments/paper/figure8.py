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
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

from ntkfl.audit.analytic import gaussian_prior, invert
from ntkfl.audit.measures import guesses, psnr, ssim
from ntkfl.data import load
from ntkfl.federation.build import build_network
from ntkfl.federation.config import ModelConfig
from ntkfl.methods.ntk_fl import TangentRows
from ntkfl.methods.task import Task
from ntkfl.privacy.settings import Privacy
from ntkfl.tangent import Jacobian
from ntkfl.wire import Message
from ntkfl_experiments.paper.deep_leakage import Settings, match_jacobian, reconstruct
from ntkfl_experiments.paper.item import Beside, Context, Findings, Item, ItemResult, Verdict
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


@dataclass(frozen=True)
class Point:
    """SSIM and PSNR of every picture by one attack at one sparsity; `pictures` [n, 1, 28, 28] are what it drew."""

    sparsity: float
    attack: str
    ssim: tuple[float, ...]
    psnr: tuple[float, ...]
    pictures: Tensor

    @property
    def mean(self) -> float:
        return statistics.fmean(self.ssim)

    @property
    def error(self) -> float:
        """Of the mean: the standard deviation over √n."""
        return statistics.stdev(self.ssim) / math.sqrt(len(self.ssim))


@dataclass(frozen=True)
class Curve:
    """All points, the originals [n, 1, 28, 28], and what the mean picture of each label would score."""

    points: list[Point]
    originals: Tensor
    guess: tuple[float, ...]
    settings: dict[str, Any]

    def at(self, sparsity: float, attack: str) -> Point:
        return next(p for p in self.points if (p.sparsity, p.attack) == (sparsity, attack))

    @property
    def sparsities(self) -> list[float]:
        return sorted({p.sparsity for p in self.points})


def run(
    images: int = 12,
    sparsities: Sequence[float] = (*PAPER, *BEYOND),
    *,
    seed: int = 0,
    settings: Settings | None = None,
    network: str = PERCEPTRON,
    trained: int = 0,
) -> Curve:
    """Attack the first `images` training pictures, at the weights `seed` gives, after `trained` steps on others."""
    settings = settings or Settings(steps=80, restarts=2, seed=seed)
    dataset = load("fashion-mnist")
    x, y = dataset.rows.take(torch.arange(images))
    public = dataset.test_rows.take()
    kind = ModelConfig(hidden=(100,)) if network == PERCEPTRON else ModelConfig(name=network)
    model = build_network(kind, tuple(x.shape[1:]), dataset.output_dim, seed)
    train(model, *dataset.rows.take(torch.arange(images, images + 20_000 if trained else images)), trained)
    task = Task(model, dataset.output_dim, "ce")
    prior = gaussian_prior(public[0])
    mean, std = dataset.rows.mean[0], dataset.rows.std[0]

    def pictures(flat: Tensor) -> Tensor:
        return (flat.view(-1, *x.shape[1:]) * std + mean).clamp(0, 1)

    originals = pictures(x)
    points = []
    for sparsity in sparsities:
        J = _received(Task(model, dataset.output_dim, "ce", privacy=Privacy(sparsity=sparsity)), x, y)
        dense = J.dense()
        for attack in ATTACKS:
            if attack == "analytic":
                found = invert(task.at(task.like), J, prior)
                if found is None:
                    continue
                drawn = found.x
            else:
                drawn, _ = reconstruct(
                    match_jacobian(model, x.shape[1:], dense, attack), images, x[0].numel(), settings
                )
            seen = pictures(drawn)
            likeness, noise = (tuple(measure(originals, seen).tolist()) for measure in (ssim, psnr))
            points.append(Point(sparsity, attack, likeness, noise, seen))
    guess = tuple(ssim(originals, pictures(guesses(public, y))).tolist())
    notes: dict[str, Any] = {"images": images, "seed": seed, "steps": settings.steps}
    notes |= {"restarts": settings.restarts, "network": network, "trained": trained}
    return Curve(points, originals, guess, notes)


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, batch: int = 200, lr: float = 0.1) -> None:
    """`steps` of plain descent on batches in the order given."""
    optimiser = torch.optim.SGD(model.parameters(), lr)
    for step in range(steps):
        rows = torch.arange(step * batch, (step + 1) * batch) % len(y)
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def _received(task: Task, x: Tensor, y: Tensor) -> Jacobian:
    """The Jacobian as the aggregator has it: through a client's reply, its bytes, and back."""
    sent = TangentRows.of(task, task.like, x, y).message(1).encode()
    return TangentRows.parse(Message.decode(sent), task).J


def monotone(curve: Curve, attack: str) -> bool:
    """Whether likeness falls with sparsity, within two standard errors of each step's difference."""
    points = sorted((p for p in curve.points if p.attack == attack), key=lambda p: p.sparsity)
    pairs = itertools.pairwise(points)
    return all(b.mean <= a.mean + 2 * math.hypot(a.error, b.error) for a, b in pairs)


def dump(curve: Curve) -> dict[str, Any]:
    """Plain values for JSON."""
    points = [
        {"sparsity": p.sparsity, "attack": p.attack, "mean": p.mean, "spread": statistics.stdev(p.ssim),
         "ssim": [round(v, 5) for v in p.ssim], "psnr": [round(v, 2) for v in p.psnr]}
        for p in curve.points
    ]  # fmt: skip
    trend = {attack: monotone(curve, attack) for attack in ATTACKS}
    paper = {str(s): v for s, v in PAPER.items()}
    return {"settings": curve.settings, "paper": paper, "guess": statistics.fmean(curve.guess), "monotone": trend,
            "points": points}  # fmt: skip


def figure(curve: Curve) -> Figure:
    """One picture by sparsity and attack, and the curves with the paper's."""
    sparsities = curve.sparsities
    drawn = Figure(figsize=(12.5, 5.2), layout="constrained", dpi=110)
    FigureCanvasAgg(drawn)
    halves: Any = drawn.subfigures(1, 2, width_ratios=(1.25, 1))
    left, right = halves
    grid = left.subplots(len(ATTACKS), 1 + len(sparsities))
    for r, attack in enumerate(ATTACKS):
        cells = [(curve.originals[0], "original")]
        cells += [(curve.at(s, attack).pictures[0], f"{s:.0%}") for s in sparsities]
        for c, (picture, title) in enumerate(cells):
            axis = grid[r][c]
            axis.imshow(picture[0].numpy(), cmap="gray", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_title(title if r == 0 else "", fontsize=9)
            score = "" if c == 0 else f"{curve.at(sparsities[c - 1], attack).ssim[0]:.2f}"
            axis.set_xlabel(score, fontsize=8.5)
        grid[r][0].set_ylabel(NAMES[attack].replace(", ", ",\n").replace(" on ", "\non "), fontsize=8.5)
    axis = right.subplots()
    axis.plot([100 * s for s in PAPER], list(PAPER.values()), "k--o", label="paper (one picture)", markersize=4)
    for attack, colour in zip(ATTACKS, ("#E69F00", "#0072B2", "#D55E00"), strict=True):
        points = [curve.at(s, attack) for s in sparsities]
        spread = [statistics.stdev(p.ssim) for p in points]
        x, y = [100 * s for s in sparsities], [p.mean for p in points]
        axis.errorbar(x, y, yerr=spread, fmt="-o", color=colour, label=NAMES[attack], markersize=4, capsize=2)
    axis.axhline(statistics.fmean(curve.guess), color="#777777", linestyle=":", label="mean picture of the label")
    axis.set_xlabel("entries of the Jacobian left out, %")
    axis.set_ylabel("SSIM of the reconstruction")
    axis.set_ylim(0, 1.08)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8.5, loc="lower left")
    return drawn


def attack(context: Context) -> ItemResult:
    """Three attackers on top-k rows as they go over the wire; a sparsity at a time, so that each is kept."""
    images, steps, restarts = (4, 40, 1) if context.quick else (12, 80, 2)
    sparsities = (0.5, 0.9, 0.97) if context.quick else (*PAPER, *BEYOND)
    common = {"images": images, "steps": steps, "restarts": restarts, "seed": 0}
    keys: list[dict[str, Any]] = [{"sparsity": s, **common} for s in sparsities]
    others = [
        {"sparsity": s, **common, "images": min(images, 4), "network": network, "trained": trained}
        for network, trained in (SETTINGS[:2] if context.quick else SETTINGS)[1:]
        for s in (0.5, 0.9)
    ]
    answers = context.cells("attacks by sparsity", keys, _at_sparsity)
    elsewhere = context.cells("attacks on other networks and weights", others, _at_sparsity)
    notes = {"network": "784-100-10, Kaiming", "images": images, "steps": steps, "restarts": restarts}
    points = [
        Point(p["sparsity"], p["attack"], tuple(p["ssim"]), tuple(p["psnr"]), _picture(p["picture"]))
        for answer in answers
        for p in answer["points"]
    ]
    curve = Curve(points, _picture(answers[0]["original"]), tuple(answers[0]["guess"]), notes)
    choices = [
        "the paper names sparsity and SSIM, no more: network, optimiser, starts and steps are ours",
        "pictures are the first training images of Fashion-MNIST; SSIM is their mean",
        "trained: 300 steps of 0.1 on batches of 200 other pictures; the CNN is that of `ntkfl.models`",
        *([QUICK_CHOICE] if context.quick else []),
    ]
    more = [
        {"network": key["network"], "trained": key["trained"], "sparsity": p["sparsity"], "attack": p["attack"],
         "mean": statistics.fmean(p["ssim"]), "guess": statistics.fmean(answer["guess"])}
        for key, answer in zip(others, elsewhere, strict=True) for p in answer["points"]
    ]  # fmt: skip
    return ItemResult(notes, [0], dump(curve) | {"elsewhere": more}, figure(curve), choices)


def _at_sparsity(key: Mapping[str, Any]) -> dict[str, Any]:
    settings = Settings(steps=key["steps"], restarts=key["restarts"], seed=key["seed"])
    network, trained = key.get("network", PERCEPTRON), key.get("trained", 0)
    curve = run(
        key["images"], (key["sparsity"],), seed=key["seed"], settings=settings, network=network, trained=trained
    )
    points = [
        {"sparsity": p.sparsity, "attack": p.attack, "ssim": p.ssim, "psnr": p.psnr, "picture": _rows(p.pictures[0])}
        for p in curve.points
    ]
    return {"points": points, "original": _rows(curve.originals[0]), "guess": curve.guess}


def _rows(picture: Tensor) -> list[list[float]]:
    """[1, 28, 28] as plain numbers, fine enough for a screen."""
    return [[round(v, 3) for v in row] for row in picture[0].tolist()]


def _picture(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows)[None, None]


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


ITEMS = (Item("fig8", "reconstruction of inputs against sparsity of the Jacobian", attack, judge),)
