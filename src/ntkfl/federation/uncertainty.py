"""How sure a run's model is of what it says: its last layer's posterior, from the sums that trained it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist

import torch
from torch import Tensor, nn

from ntkfl.errors import ConfigError
from ntkfl.methods.last_layer import head_inputs
from ntkfl.tangent.posterior import HeadPosterior, Prediction

_TEMPERATURES = tuple(10 ** (i / 40) for i in range(-40, 61))
LEVELS = (0.5, 0.8, 0.9, 0.95)  # of intervals whose coverage is measured


class ModelPosterior:
    """A trained network and the posterior of its last layer. Class probabilities are taken to the power of
    1/`temperature`: see `tempered`.
    """

    def __init__(self, model: nn.Module, outputs: int, head: HeadPosterior, temperature: float = 1.0) -> None:
        self.model, self.outputs, self.head, self.temperature = model, outputs, head, temperature

    def predict(self, x: Tensor) -> Prediction:
        """For inputs x [N, …] as the network gets them: outputs, their standard deviations, and class probabilities or
        the noise of targets; float64, on the CPU.
        """
        like = next(self.model.parameters())
        x = x.to(like.device, like.dtype if x.is_floating_point() else x.dtype)
        parts = [self.head.predict(features, given) for features, given in head_inputs(self.model, self.outputs, x)]
        if not parts:
            raise ConfigError("no samples to predict for")
        said = [p.probabilities for p in parts if p.probabilities is not None]
        return Prediction(
            torch.cat([p.outputs for p in parts]),
            torch.cat([p.std for p in parts]),
            _tempered(torch.cat(said), self.temperature) if said else None,
            parts[0].noise,
        )

    def tempered(self, x: Tensor, y: Tensor) -> ModelPosterior:
        """With the temperature of least log loss on samples that did not train: x [N, …], classes y [N].

        It makes up for what is assumed: that classes are Gaussian, that curvature factors, that training has converged.
        """
        plain = ModelPosterior(self.model, self.outputs, self.head).predict(x).probabilities
        if plain is None or y.is_floating_point():
            raise ConfigError("a temperature is of class probabilities, and these targets are real")
        best = min(_TEMPERATURES, key=lambda temperature: _log_loss(_tempered(plain, temperature), y.cpu()))
        return ModelPosterior(self.model, self.outputs, self.head, best)


def _tempered(p: Tensor, temperature: float) -> Tensor:
    return (p.clamp(min=torch.finfo(p.dtype).tiny).log() / temperature).softmax(1)


@dataclass(frozen=True)
class Calibration:
    """On samples with known targets. Of classes: accuracy, log loss and calibration error with the posterior's class
    probabilities, and `plain`, with the outputs alone, as training measures, or their softmax. The two accuracies
    differ where the likeliest class is not that of the largest output. Of real targets: what part lies in intervals of
    each nominal level.
    """

    samples: int
    accuracy: float | None = None
    log_loss: float | None = None
    calibration_error: float | None = None
    plain_accuracy: float | None = None
    plain_log_loss: float | None = None
    plain_calibration_error: float | None = None
    coverage: dict[str, float] | None = None
    mean_std: float | None = None

    def json(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None}, indent=1)


def calibration(prediction: Prediction, y: Tensor) -> Calibration:
    """How well what was predicted fits the targets: classes [N], or real [N, d2]."""
    y, mean_std = y.cpu(), float(prediction.std.mean())
    if prediction.probabilities is None or y.is_floating_point():
        return Calibration(len(y), coverage=coverage(prediction, y), mean_std=mean_std)
    p, plain = prediction.probabilities, prediction.outputs.softmax(1)
    return Calibration(
        len(y),
        float((p.argmax(1) == y).double().mean()),
        _log_loss(p, y),
        expected_calibration_error(p, y),
        float((prediction.outputs.argmax(1) == y).double().mean()),
        _log_loss(plain, y),
        expected_calibration_error(plain, y),
        mean_std=mean_std,
    )


def halves(samples: int) -> tuple[Tensor, Tensor]:
    """Two random halves of so many samples, always the same: to calibrate on, and to measure on."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    return order[: samples // 2], order[samples // 2 :]


def expected_calibration_error(probabilities: Tensor, y: Tensor, bins: int = 15) -> float:
    """Σ_b n_b/n |accuracy_b − confidence_b| over bins of equal width of the largest probability (Guo et al. 2017)."""
    sure, said = probabilities.max(1)
    right = (said == y).double()
    which = (sure * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, which, right - sure.double())
    return float(gaps.abs().sum() / len(y))


def coverage(prediction: Prediction, y: Tensor, levels: Sequence[float] = LEVELS) -> dict[str, float]:
    """The part of targets [N, d2] within the central interval of each level."""
    if prediction.noise is None:
        raise ConfigError("intervals are of real targets, and these outputs are of classes")
    spread = (prediction.std.square() + prediction.noise.square()).sqrt()
    far = (y.double() - prediction.outputs).abs() / spread
    bounds = {level: NormalDist().inv_cdf(0.5 + level / 2) for level in levels}
    return {f"{level:g}": float((far <= bound).double().mean()) for level, bound in bounds.items()}


def _log_loss(p: Tensor, y: Tensor) -> float:
    return float(-p.gather(1, y.unsqueeze(1)).clamp(min=1e-12).log().mean())
