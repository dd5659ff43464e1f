"""What clients sent as the aggregator has it, by kind of reply: rows, local models, or sums over samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from ntkfl.audit.analytic import LinearLayer
from ntkfl.audit.capture import Capture
from ntkfl.errors import ConfigError
from ntkfl.methods.averaging.local_training import LocalTraining
from ntkfl.methods.ntk_fl import TangentRows
from ntkfl.methods.replies import STEPS, WEIGHTS, Reply, Rows, Update
from ntkfl.methods.sums.private_sums import is_whitening, read_whitening
from ntkfl.privacy.sum_noise import COUNT, GRAINS
from ntkfl.tangent import Jacobian, Sums, concatenate
from ntkfl.tangent.clipping import whitened
from ntkfl.tangent.sums import GRADIENT, REST, SAMPLES


@dataclass(frozen=True)
class ReceivedRows:
    """J [n, d2, d] in the form it came in, outputs [n, d2], labels [n]; `index` are the rows' places in the round."""

    J: Jacobian
    outputs: Tensor
    labels: Tensor
    index: Tensor


def sends_rows(capture: Capture) -> bool:
    """Whether clients send per-sample Jacobians."""
    return issubclass(capture.reply, TangentRows)


def sends_samples(capture: Capture) -> bool:
    """Whether clients send the samples themselves."""
    return issubclass(capture.reply, Rows) and not sends_rows(capture)


def rows_of(capture: Capture, wanted: Sequence[int] | None = None) -> ReceivedRows:
    """The rows `wanted` (places in the round, ascending; all if None)."""
    if not sends_rows(capture):
        raise ConfigError(f"replies of {capture.method.name} have no rows of samples")
    at, parts = 0, []
    for upload in capture.uploads:
        J, outputs, labels = upload.J, upload.outputs, upload.labels  # type: ignore[attr-defined]
        here = range(len(J)) if wanted is None else [i - at for i in wanted if 0 <= i - at < len(J)]
        if len(here):
            index = torch.tensor(list(here))
            parts.append((J[index], outputs[index], labels[index], index + at))
        at += len(J)
    Js, *tensors = zip(*parts, strict=True)
    return ReceivedRows(concatenate(list(Js)), *(torch.cat(t) for t in tensors))


def spread(capture: Capture, count: int) -> list[int]:
    """`count` rows of a round, evenly spread over it, so that few of them are one client's."""
    total = sum(len(y) for _, y in capture.truth)
    count = min(count, total)
    return [i * total // count for i in range(count)]


@dataclass(frozen=True)
class LocalModel:
    """Where local training ended: weights [d] after `steps` steps of rate `lr` on batches of `batch_size`."""

    weights: Tensor
    lr: float
    steps: int
    batch_size: int


def local_models(capture: Capture) -> list[LocalModel]:
    """Each client's; none where replies are no updates, where a shuffler mixes them, or where masks hide them."""
    if capture.senders is not None or capture.masked:
        return []
    found = [_local_model(capture, reply) for reply in capture.uploads]
    return [model for model in found if model is not None]


def _local_model(capture: Capture, reply: Reply) -> LocalModel | None:
    """Methods send weights, or their change over the learning rate and, where they count steps, over these."""
    method = capture.method
    if not isinstance(reply, Update) or not isinstance(method, LocalTraining):
        return None
    epochs = (method.local_epochs or 0) * -(-reply.samples // method.batch_size)
    steps = int(reply.take(STEPS)) if STEPS in reply.arrays else epochs or method.local_steps
    name, w = reply.vectors[0], capture.weights
    if name == WEIGHTS:
        weights = reply.vector(name, w)
    else:
        weights = w - method.lr * (steps if STEPS in reply.arrays else 1) * reply.vector(name, w)
    return LocalModel(weights, method.lr, steps, method.batch_size)


@dataclass(frozen=True)
class ReceivedSums:
    """Sums as somebody has them, in float64, `resolution` being the part of an entry that rounding leaves unsure; and,
    for scoring only, the records behind them: x [n, d1] as the network takes it, y.
    """

    sums: Sums
    resolution: float
    x: Tensor
    y: Tensor

    @property
    def samples(self) -> int:
        return int(self.sums.arrays[SAMPLES])

    @property
    def gradient(self) -> Tensor:
        return self.sums.arrays[GRADIENT]

    def factor(self, layer: LinearLayer) -> Tensor | None:
        """A linear layer's Σ v vᵀ [m, m] with v = [input, 1]; None where it did not come whole."""
        layers = self.sums.layers() if any("/" in name for name in self.sums.arrays) else []
        shaped = next((shaped for shaped in layers if shaped.layer.weight[0] == layer.weight.start), None)
        if shaped is None or shaped.inputs is None or shaped.inputs.form or layer.bias is None:
            return None
        A = shaped.inputs.square()[0]
        return A if float(A[-1, -1]) > 0.5 else None  # zeros stand for one that was sent before

    def __add__(self, other: ReceivedSums) -> ReceivedSums:
        x, y = torch.cat([self.x, other.x]), torch.cat([self.y, other.y])
        return ReceivedSums(self.sums + other.sums, self.resolution, x, y)


def sums_of(capture: Capture) -> list[ReceivedSums]:
    """Each client's; none where replies are no sums."""
    order = capture.senders if capture.senders is not None else capture.cohort
    found = []
    for sender, reply in zip(order, capture.uploads, strict=False):
        read = _read_sums(capture, reply)
        if read is None:
            return []
        x, y = capture.truth[capture.cohort.index(sender)]
        found.append(ReceivedSums(*read, x.flatten(1), y))
    return found


def total_of(clients: Sequence[ReceivedSums]) -> ReceivedSums:
    """What a secure sum leaves."""
    return reduce(add, clients)


def _read_sums(capture: Capture, reply: Reply) -> tuple[Sums, float] | None:
    """A reply as sums over its samples and their resolution: sums as they are, or a locally trained model, whose way
    from the broadcast weights is taken for one long step along the gradient. None where the reply is neither.
    """
    exact = capture.task.like.new_empty(0, dtype=torch.float64, device="cpu")
    if SAMPLES not in reply.arrays or reply.arrays[SAMPLES].numel() != 1:
        return None
    samples = reply.take(SAMPLES).reshape(()).to(exact)
    if GRADIENT in reply.arrays and not reply.arrays[GRADIENT].is_floating_point():
        return _read_private(capture, reply, exact), 2.0**-23
    if GRADIENT in reply.arrays:
        names = [name for name in reply.arrays if name in (GRADIENT, REST) or "/" in name]
        rounding = 2.0**-11 if GRADIENT in reply.halves else 2.0**-23
        return Sums({name: reply.take(name, None, exact) for name in names} | {SAMPLES: samples}), rounding
    trained = _local_model(capture, reply)
    if trained is None:
        return None
    way = (capture.weights - trained.weights).to(exact)
    return Sums({GRADIENT: way * samples / (trained.lr * trained.steps), SAMPLES: samples}), 2.0**-20


def _read_private(capture: Capture, reply: Reply, exact: Tensor) -> Sums:
    """The integers of `private-sums` as a gradient and a count, with the public whitening taken back."""
    clip = float(capture.method.model_dump()["clip"])
    gradient, broadcast = reply.take(GRADIENT, None, exact) * clip / GRAINS, capture.broadcast
    sent = {name: broadcast.take(name, None, exact) for name in broadcast.arrays if is_whitening(name)}
    like, damping = capture.task.like.to(exact), capture.method.model_dump().get("damping", 0.0)
    inverse = {layer: torch.linalg.inv(P) for layer, P in read_whitening(sent, like, damping).items()}
    count = reply.take(SAMPLES).reshape(()).to(exact) / COUNT
    return Sums({GRADIENT: whitened(gradient, inverse), SAMPLES: count})
