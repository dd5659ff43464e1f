"""Figure 8: how like the original a reconstruction is, against how much of the Jacobian was left out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ntkfl.audit import figure8
from ntkfl.audit.deep_leakage import Settings
from ntkfl.audit.figure8 import ATTACKS, BEYOND, PAPER, Curve, Point
from ntkfl.paper.item import Context, Finding, Item, Outcome
from ntkfl.paper.settings import QUICK_CHOICE


def attack(context: Context) -> Outcome:
    """Three attackers on top-k rows as they go over the wire; a sparsity at a time, so that each is kept."""
    images, steps, restarts = (4, 40, 1) if context.quick else (12, 80, 2)
    sparsities = (0.5, 0.9, 0.97) if context.quick else (*PAPER, *BEYOND)
    keys = [{"sparsity": s, "images": images, "steps": steps, "restarts": restarts, "seed": 0} for s in sparsities]
    answers = context.cells("attacks by sparsity", keys, _at_sparsity)
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
        *([QUICK_CHOICE] if context.quick else []),
    ]
    return Outcome(notes, [0], figure8.dump(curve), _findings(curve), figure8.figure(curve), choices)


def _at_sparsity(key: Mapping[str, Any]) -> dict[str, Any]:
    settings = Settings(steps=key["steps"], restarts=key["restarts"], seed=key["seed"])
    curve = figure8.run(key["images"], (key["sparsity"],), seed=key["seed"], settings=settings)
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


def _findings(curve: Curve) -> list[Finding]:
    shared = [s for s in curve.sparsities if s in PAPER]
    ours = {a: [curve.at(s, a).mean for s in shared] for a in ATTACKS}
    best = [max(values) for values in zip(*ours.values(), strict=True)]
    highest = curve.sparsities[-1]
    return [
        Finding(
            "sparsification is effective against reconstruction",
            "SSIM " + ", ".join(f"{PAPER[s]:.2f} at {s:.0%}" for s in shared),
            "best attack: " + ", ".join(f"{v:.2f} at {s:.0%}" for s, v in zip(shared, best, strict=True)),
            best[-1] <= PAPER[shared[-1]] + 0.1,
            f"the closed form still has {curve.at(highest, 'analytic').mean:.2f} at {highest:.0%}; a guess by label "
            f"{statistics.fmean(curve.guess):.2f}",
        ),
        Finding(
            "a reconstruction is worse the more is left out",
            "SSIM falls from 0.65 to 0.06",
            "; ".join(f"{a}: {'falls' if figure8.monotone(curve, a) else 'does not fall'}" for a in ATTACKS),
            all(figure8.monotone(curve, a) for a in ATTACKS),
        ),
    ]


ITEMS = (Item("fig8", "reconstruction of inputs against sparsity of the Jacobian", attack),)
