"""How near a reconstruction is: SSIM, PSNR, relative error; and what a guess would have scored."""

from __future__ import annotations

import torch
from torch import Tensor

from ntkfl.extras import missing


def ssim(original: Tensor, recovered: Tensor) -> Tensor:
    """Structural similarity of pictures [n, C, H, W] in 0..1, one number each, [n]. 1: the same; about 0: unrelated.

    Wang et al. 2004 with Gaussian windows of σ = 1.5 (11×11), σ = 0.5 for pictures smaller than 16 pixels.
    """
    try:
        from torchmetrics.functional.image import structural_similarity_index_measure as measure
    except ImportError:
        raise missing("the audit", "audit") from None
    sigma = 1.5 if min(original.shape[-2:]) >= 16 else 0.5
    a, b = original.float(), recovered.nan_to_num().clamp(0, 1).float()
    values = measure(b, a, data_range=1.0, sigma=sigma, reduction="none")
    assert isinstance(values, Tensor)
    return values.reshape(len(original))


def best_ssim(originals: Tensor, candidates: Tensor) -> Tensor:
    """Of each original [n, C, H, W], its SSIM to whichever candidate [m, C, H, W] is most like it, [n]."""
    return torch.stack([ssim(x.expand_as(candidates), candidates).max() for x in originals])


def psnr(original: Tensor, recovered: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in decibels, [n]; at most 100, which is equality to about float32's precision."""
    error = (original - recovered.nan_to_num().clamp(0, 1)).double().square().flatten(1).mean(1)
    return (-10 * error.clamp_min(1e-10).log10()).to(original.dtype)


def relative_error(original: Tensor, recovered: Tensor) -> Tensor:
    """‖x̂ − x‖/‖x‖ for each row, [n]; 0: exact; 1: as good as zero."""
    difference = (recovered - original).flatten(1).norm(dim=1)
    size: Tensor = original.flatten(1).norm(dim=1).clamp_min(torch.finfo(original.dtype).tiny)
    return torch.div(difference, size)


def guesses(public: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """The public mean input of each label in `labels`, [n, ...]; of all where a label is unknown."""
    x, y = public
    everything = x.mean(0)
    if y.is_floating_point():
        return everything.expand(len(labels), *x.shape[1:])
    means = {c: x[y == c].mean(0) for c in sorted(set(y.tolist()))}
    return torch.stack([means.get(int(c), everything) for c in labels])
