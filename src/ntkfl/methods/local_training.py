"""What methods share whose clients train locally: options, updates packed and read, their robust combination."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import ConfigError, MessageError, NumericalError, unknown
from ntkfl.methods.additive import Summand, mean_update, update_summand
from ntkfl.methods.base import ClientRound, Method, Task, check_finite
from ntkfl.methods.batchnorm import answer
from ntkfl.methods.corruption import change_of, with_numbers
from ntkfl.methods.inspection import Corruption, LocalUpdate
from ntkfl.methods.local_sgd import train_locally
from ntkfl.methods.robust import COMBINATIONS, clip_factors, combine, fair_counts
from ntkfl.methods.stateful_sgd import Adjustment, LocalResult
from ntkfl.wire import Message

WEIGHTINGS = ("samples", "uniform")
_SPEED = "local_steps"  # in a client's memory, where it draws them
UPDATE_LIMIT = 1.5  # of clip: most that an update may measure, in units of the median one's length
_TRIM = 0.2  # share of clients that `trimmed` leaves out at both ends
FAIR = 3.0  # median clients that one counts for, at most, by the samples or steps it reports


class LocalTraining(Method):
    """Options of every method whose clients train locally, and the two ends of the round they share."""

    trains_locally: ClassVar[bool] = True
    vectors: ClassVar[tuple[str, ...]] = ("weights",)  # arrays [d] of an update

    lr: float = Field(0.1, gt=0, description="local learning rate")
    local_steps: int = Field(20, ge=1, description="gradient steps a client takes in a round")
    local_epochs: int | None = Field(
        None, ge=1, description="in place of local_steps: as many steps as that many passes over a client's own samples"
    )
    most_local_steps: int | None = Field(
        None,
        ge=1,
        description="clients are of unequal speed: each draws its steps in a round once, from local_steps to this many",
    )
    batch_size: int = Field(200, ge=1, description="samples in a local step; a smaller client uses all it has")
    weighting: str = Field("uniform", description="clients count equally (the paper's objective) or by their samples")

    robust: str = Field(
        "mean", description="how updates are combined: mean, clip (their mean, none too long), median or trimmed"
    )

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.secure_sum and self.robust != "mean":
            why = "compares clients' updates, of which a secure sum shows none"
            raise ConfigError(f"robust = {self.robust!r} {why}: leave it out")
        if self.robust not in COMBINATIONS:
            raise unknown("combination", self.robust, COMBINATIONS)
        if self.most_local_steps is not None and (self.local_epochs or self.most_local_steps < self.local_steps):
            raise ConfigError("most_local_steps is at least local_steps, and local_epochs is left out beside it")
        if self.weighting not in WEIGHTINGS:
            raise ConfigError(f"unknown weighting {self.weighting!r}: valid are {', '.join(WEIGHTINGS)}")

    @property
    def most_samples(self) -> int | None:
        return super().most_samples if self.weighting == "samples" else None

    def summand(self, task: Task, message: Message, reply: Message) -> Summand:
        most = self.sum_samples if self.weighting == "samples" else None
        return update_summand(message, reply, most, self.sum_limit)

    def from_total(self, task: Task, message: Message, total: Mapping[str, Tensor], clients: int) -> Message:
        most = self.sum_samples if self.weighting == "samples" else None
        return mean_update(message, total, clients, most, task.like)

    def steps(self, client: ClientRound) -> int:
        """τ_m, the client's gradient steps in a round."""
        if self.local_epochs is not None:
            return self.local_epochs * -(-len(client) // self.batch_size)
        if self.most_local_steps is None:
            return self.local_steps
        if _SPEED not in client.memory:  # drawn once: were it drawn anew each round, clients' work would even out
            drawn = client.randomness.integers("steps", 1, self.most_local_steps - self.local_steps + 1)
            client.memory[_SPEED] = self.local_steps + torch.from_numpy(drawn)[0]
        return int(client.memory[_SPEED])

    def train(
        self, task: Task, weights: Tensor, clients: Sequence[ClientRound], adjust: Adjustment | None = None
    ) -> LocalResult:
        steps = [self.steps(client) for client in clients]
        result = train_locally(task, weights, clients, steps, self.lr, self.batch_size, adjust)
        if bool(result.weights.isfinite().all() & result.losses.isfinite().all()):  # one answer from the device, not 2M
            return result
        for client, w_m, loss in zip(clients, *result, strict=True):
            check_finite(w_m, f"the local model of client {client.id}")
            check_finite(loss.float(), f"the local loss of client {client.id}")
        return result

    def client_weights(self, replies: Sequence[Message], like: Tensor) -> Tensor:
        """p_m, summing to one: uniform, or in proportion to the samples that clients report. [M]

        What is reported may be false: unless `robust` is mean, a client counts for three median ones at most.
        """
        samples = torch.stack([r.take("samples", ()) for r in replies]).to(like)
        if bool((samples < 1).any()):
            raise MessageError("a client reports that it trained on no samples")
        if self.robust != "mean":
            samples = fair_counts(samples, FAIR)
        p = samples if self.weighting == "samples" else torch.ones_like(samples)
        return p / p.sum()

    def check(self, task: Task, reply: Message) -> Tensor | None:
        """The largest norm of its vectors, or that of the network's first weights where none is larger."""
        super().check(task, reply)
        self.client_weights([reply], task.like)
        like = task.like.cpu()
        norms = [self.take(reply, name, like).double().norm() for name in self.vectors]
        return torch.stack([like.double().norm(), *norms]).amax().reshape(1, 1)

    def combine(self, vectors: Iterable[Tensor], p: Tensor, base: Tensor | None = None) -> Tensor:
        """Σ_m p_m v_m, of the changes v_m − base none longer than `UPDATE_LIMIT` times the median one; or what else
        `robust` says: of the changes again, and for the median and the trimmed mean clients all count the same.
        """
        if self.robust == "mean":
            return weighted_sum(vectors, p)
        if self.robust != "clip":
            changes = vectors if base is None else (v - base for v in vectors)
            combined = combine(self.robust, changes, _TRIM)
            return combined if base is None else base + combined
        kept = list(vectors)
        lengths: Tensor = torch.stack([(v if base is None else v - base).double().norm() for v in kept])
        factors = clip_factors(lengths, UPDATE_LIMIT).to(p)
        if bool((factors < 1).any()):
            zero = torch.zeros_like(kept[0]) if base is None else base
            kept = [v if factor == 1 else zero + factor * (v - zero) for v, factor in zip(kept, factors, strict=True)]
        return weighted_sum(kept, p)

    def take(self, reply: Message, name: str, like: Tensor) -> Tensor:
        """A vector [d] of an update."""
        return take_vector(reply, "update", name, like)

    def local_update(self, reply: Message, w: Tensor) -> LocalUpdate | None:
        if "weights" not in self.vectors:
            return None
        return LocalUpdate(self.take(reply, "weights", w), self.local_steps, self.lr, self.batch_size)

    @property
    def attacks(self) -> frozenset[str]:
        return frozenset({"random", "sign-flip", "scaled-labels"})

    def corrupt(
        self, corruption: Corruption, task: Task, asked: Message, reply: Message, client: ClientRound
    ) -> Message:
        """With other vectors: the change of the weights they bring is what changes."""
        if corruption.kind == "scaled-labels":
            return self._with_scaled_labels(corruption.scale, task, asked, reply, client)
        if corruption.kind not in ("random", "sign-flip"):
            return reply
        change, arrays = change_of(corruption), dict(reply.arrays)
        for name in self.vectors:
            base = asked.take("weights", None, task.like) if name == "weights" else torch.zeros_like(task.like)
            arrays[name] = base + change((self.take(reply, name, task.like) - base).unsqueeze(0))[0]
        return replace(reply, arrays=arrays)

    def _with_scaled_labels(
        self, scale: float, task: Task, asked: Message, reply: Message, client: ClientRound
    ) -> Message:
        """Cross-entropy is linear in its targets, so targets times s are the learning rate times s. A client whose
        training diverges sends what came of it: numbers that are not finite.
        """
        scaled = self.model_copy(update={"lr": self.lr * scale})
        try:
            return answer(scaled, task, asked, [client])[0]
        except NumericalError:
            return with_numbers(reply, lambda a: a * float("nan"))


def report(client: ClientRound, loss: Tensor) -> dict[str, Tensor]:
    """What every local update carries beside itself: sample count and the mean loss met on the way."""
    return {"samples": torch.tensor(len(client), dtype=torch.int32), "loss": loss.to(torch.float32)}


def take_vector(message: Message, kind: str, name: str, like: Tensor) -> Tensor:
    """The array `name` [d] of a message that must be of this kind."""
    return message.of_kind(kind).take(name, tuple(like.shape), like)


def weighted_sum(vectors: Iterable[Tensor], p: Tensor) -> Tensor:
    """Σ_m p_m v_m as a running sum, so that no two clients' vectors need be held at once."""
    total = torch.zeros((), dtype=p.dtype, device=p.device)
    for share, vector in zip(p, vectors, strict=True):
        total = total + share * vector
    return total


def mean_loss(replies: Sequence[Message], p: Tensor) -> float | None:
    """The cohort's local training loss, weighted as the clients are; None where clients keep theirs to themselves."""
    if not all("loss" in reply.arrays for reply in replies):
        return None
    return float((torch.stack([r.take("loss", ()) for r in replies]).to(p) * p).sum())
