"""Attacks 1 and 2 on a capture: clients' inputs as the aggregator draws them, alone and with who has the projection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ntkfl.audit.analytic import gaussian_prior, invert, lift, linear_layers
from ntkfl.audit.capture import Capture
from ntkfl.audit.deep_leakage import Settings, match_gradient, match_jacobian, match_update, reconstruct
from ntkfl.audit.finding import Finding
from ntkfl.audit.measures import best_ssim, guesses, psnr, relative_error, ssim
from ntkfl.audit.received import ReceivedRows, local_updates, rows_of, sends_rows, spread

INSIDERS = ("aggregator+client", "aggregator+key-server")  # who has P beside the rows
_SHOWN = 8
_SCORED = 10  # of a client's pictures, where one update stands for all of them


def analytic(capture: Capture, seed: int = 0, *, count: int = 40) -> list[Finding]:
    """Attack 1. `seed` is not used: nothing in it is random."""
    if not sends_rows(capture):
        return _from_update(capture)
    rows = rows_of(capture, spread(capture, count))
    prior = None
    if capture.projection is None and capture.public is not None and rows.labels.ndim == 1:
        prior = gaussian_prior(capture.public[0])
    found, width = invert(capture.task.at(capture.weights), rows.J, prior), math.prod(_shape(capture))
    if found is None or found.x.shape[1] < width:
        return []
    x, known = found.x[:, :width], found.known[:, :width]  # what a layer is given again, further on, lies behind
    more = {"coordinates read off": float(known.double().mean())}
    # What is not known lies within its bound, and the equations have said something of it: about a sixth is left.
    left = (~known).to(x) * found.bound.clamp(max=1e3).square().unsqueeze(1) / 6
    return _score("analytic inversion", capture, rows, x, more, float(left.mean() / x.square().mean()))


def deep(capture: Capture, seed: int = 0, *, count: int = 10, settings: Settings | None = None) -> list[Finding]:
    """Attack 2 on the rows' Jacobians where something was sent."""
    settings = replace(settings or Settings(), seed=seed)
    if not sends_rows(capture):
        return _match_update(capture, settings)
    rows = rows_of(capture, spread(capture, count))
    if not _tokens_free(capture):
        return []
    J = rows.J.dense()
    loss = match_jacobian(capture.task.at(capture.weights), _shape(capture), J)
    x, match = reconstruct(loss, len(J), math.prod(_shape(capture)), settings, _image(capture))
    more = {"match": float(match.mean()), "optimiser": settings.optimiser, "restarts": settings.restarts}
    return _score("deep leakage, Jacobian", capture, rows, x, more, float(match.mean()))


def deep_sum(capture: Capture, seed: int = 0, *, batch: int = 4) -> list[Finding]:
    """Attack 2 on the gradient of the mean loss over `batch` rows, which their Jacobians, outputs and labels give: what
    those samples would have shown had one gradient been sent for all. Dummies are matched to rows by label.
    """
    if not sends_rows(capture) or capture.task.loss != "ce":
        return []
    rows = rows_of(capture, spread(capture, batch))
    Y = capture.task.training_targets(rows.labels)
    gradient = -rows.J.vjp(Y - rows.outputs.softmax(1)) / len(Y)
    sent = None if not getattr(capture.method, "sparsity", 0) else gradient.ne(0)
    loss = match_gradient(capture.task.at(capture.weights), _shape(capture), gradient, Y, "ce", sent)
    x, match = reconstruct(
        loss, 1, len(Y) * math.prod(_shape(capture)), Settings(steps=120, seed=seed), _image(capture)
    )
    more = {"match": float(match[0]), "batch": len(Y)}
    return _score(f"deep leakage, gradient of {len(Y)}", capture, rows, x.view(len(Y), -1), more, float(match[0]))


def _score(
    attack: str, capture: Capture, rows: ReceivedRows, found: Tensor, more: dict[str, Any], noise: float
) -> list[Finding]:
    """Findings of network inputs recovered for these rows: of z or x, and, with P, of x behind z, which takes `noise`
    for the part of z² that is wrong.
    """
    x, y, raw = (t[rows.index] for t in capture.aligned())
    error = relative_error(x.flatten(1), found)
    chance = relative_error(x.flatten(1), _others(capture, x, y)).mean()
    hidden = capture.projection is not None
    what = "the projected input z" if hidden else "the input x"
    says = f"The network's inputs are recovered to {float(error.mean()):.1%} of their size."
    numbers = Finding(
        attack, "aggregator", what, "relative error", tuple(error.tolist()), float(chance), 0.0, says, details=more
    )
    if capture.pixels is None or capture.public is None:
        return [numbers]
    if not hidden:
        return [_pictures(attack, "aggregator", capture, raw, found, y, more), numbers]
    assert capture.projection is not None
    lifted = lift(found, capture.projection, capture.public[0], min(1.0, max(1e-4, noise)))
    behind = relative_error(raw.flatten(1), lifted)
    chance = relative_error(raw.flatten(1), guesses(capture.public, y).flatten(1)).mean()
    says = f"With P, the inputs themselves are recovered to {float(behind.mean()):.1%} of their size."
    of_x = Finding(
        f"{attack}, with P", INSIDERS[0], "the input x behind z, with P", "relative error", tuple(behind.tolist()),
        float(chance), 0.0, says, details=more,
    )  # fmt: skip
    return [
        numbers,
        *(_pictures(attack, role, capture, raw, lifted, y, more) for role in INSIDERS),
        *(replace(of_x, role=role) for role in INSIDERS),
    ]


def _pictures(
    attack: str, role: str, capture: Capture, raw: Tensor, found: Tensor, labels: Tensor, more: dict[str, Any]
) -> Finding:
    assert capture.public is not None
    original, seen = capture.images(raw), capture.images(found)
    guess = capture.images(guesses(capture.public, labels))
    likeness = ssim(original, seen)
    details = {
        **more,
        "PSNR": float(psnr(original, seen).mean()),
        "PSNR of a guess": float(psnr(original, guess).mean()),
        "relative error": float(relative_error(raw.flatten(1), found.flatten(1)).mean()),
    }
    chance = float(ssim(original, guess).mean())
    behind = "" if capture.projection is None else " behind z, with P"
    says = f"Pictures come back with an SSIM of {float(likeness.mean()):.2f} (a guess by the label: {chance:.2f})."
    shown = (original[:_SHOWN], seen[:_SHOWN])
    values = tuple(likeness.tolist())
    return Finding(
        attack, role, f"the picture x{behind}", "SSIM", values, chance, 1.0, says, None, None, details, shown
    )


def _from_update(capture: Capture) -> list[Finding]:
    """A unit's change of weights over its change of bias is a mean of the client's inputs, with weights that sum to one
    (not all positive): one picture a hidden unit, sharp where one sample moved the unit, a blend otherwise.
    """
    layers = linear_layers(capture.task.model)
    changes = _changes(capture)
    if not layers or layers[0].bias is None or not changes:
        return []
    module, candidates = layers[0].module, []
    for change in changes:
        W = change[layers[0].weight].view(module.out_features, module.in_features)
        b = change[layers[0].bias]
        moved = b.abs() > 1e-3 * b.abs().max()
        candidates.append(W[moved] / b[moved, None])
    return _score_update("analytic inversion, update", capture, candidates, {})


def _match_update(capture: Capture, settings: Settings) -> list[Finding]:
    """Local training unrolled where a client's every step is over all it has; else Δ is taken for one long step."""
    updates, changes = local_updates(capture), _changes(capture)
    if not changes or capture.task.loss != "ce" or not _tokens_free(capture):
        return []
    shape, outputs, found = _shape(capture), capture.task.outputs, []
    how, match = "one step", 0.0
    for change, update, (_, y), reply in zip(changes, updates, capture.truth, capture.uploads, strict=False):
        samples = int(reply.take("samples", ()))
        samples = len(y) if samples == 1 else samples  # noise hides the count: the attacker is given it
        steps, lr = update.steps, update.lr
        how = "one step" if steps == 1 else f"{steps} local steps unrolled"
        if samples > update.batch_size or steps > settings.steps // 3:
            how, lr, steps = f"{steps} local steps taken for one", lr * steps, 1
        sent = change.ne(0) if getattr(capture.method, "sparsity", 0) else None
        loss = match_update(capture.task.at(capture.weights), shape, change, samples, outputs, "ce", lr, steps, sent)
        width = samples * math.prod(shape)
        x, quality = reconstruct(loss, 1, width + samples * outputs, replace(settings, restarts=1), _image(capture))
        found.append(x[0, :width].view(samples, -1))
        match += float(quality[0]) / len(changes)
    return _score_update("deep leakage, update", capture, found, {"match": match, "local training": how})


def _score_update(attack: str, capture: Capture, candidates: list[Tensor], more: dict[str, Any]) -> list[Finding]:
    """Each true picture against whichever candidate is most like it; the guess is as many public pictures."""
    if capture.pixels is None or capture.public is None or not candidates:
        return []
    roles: Sequence[str] = ("aggregator",) if capture.projection is None else INSIDERS
    values, chances, originals, shown = [], [], [], []
    for found, raw in zip(candidates, capture.raw, strict=False):
        x = found if capture.projection is None else lift(found, capture.projection, capture.public[0])
        original, seen = capture.images(raw[:_SCORED]), capture.images(x)
        public = capture.images(capture.public[0][: len(seen)])
        values += best_ssim(original, seen).tolist()
        chances += best_ssim(original, public).tolist()
        originals.append(original[:_SHOWN])
        shown.append(torch.stack([seen[ssim(o.expand_as(seen), seen).argmax()] for o in original[:_SHOWN]]))
    mean, chance = sum(values) / len(values), sum(chances) / len(chances)
    many = len(candidates[0])
    says = f"The best of {many} drawn pictures has an SSIM of {mean:.2f} (as many public ones: {chance:.2f})."
    what = "a client's pictures x" + ("" if capture.projection is None else " behind z, with P")
    pictures = (torch.cat(originals)[:_SHOWN], torch.cat(shown)[:_SHOWN])
    return [
        Finding(attack, role, what, "best SSIM", tuple(values), chance, 1.0, says, None, None, more, pictures)
        for role in roles
    ]


def _changes(capture: Capture, clients: int = 2) -> list[Tensor]:
    """w_m − w of the first clients' updates; none where updates are not plain weights, or mixed by a shuffler."""
    if capture.senders is not None:
        return []
    return [update.weights - capture.weights for update in local_updates(capture, clients)]


def _others(capture: Capture, x: Tensor, y: Tensor) -> Tensor:
    """The round's mean input of each row's label: what a row's label alone would tell, [n, d1']."""
    everything, labels, _ = capture.aligned()
    return guesses((everything.flatten(1), labels), y)


def _shape(capture: Capture) -> tuple[int, ...]:
    """Of one input as the network takes it."""
    return tuple(capture.truth[0][0].shape[1:])


def _image(capture: Capture) -> tuple[int, ...] | None:
    shape = _shape(capture)
    return shape if len(shape) == 3 else None


def _tokens_free(capture: Capture) -> bool:
    return capture.truth[0][0].is_floating_point()
