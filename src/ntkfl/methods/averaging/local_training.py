"""Stochastic gradient descent by one client, and what methods of local training share: options, a round's two ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import ModelError
from ntkfl.methods.base import Method, Outcome
from ntkfl.methods.replies import WEIGHTS, Update
from ntkfl.methods.robust import fair_counts
from ntkfl.methods.task import STATISTICS, ClientRound, State, Task, check_finite, load_statistics, statistics_of
from ntkfl.tangent.losses import per_sample
from ntkfl.tangent.parameters import flatten, trainable
from ntkfl.wire.message import Message

Adjustment = Callable[[Tensor, Tensor], Tensor]  # (gradient [d], weights [d]) -> direction to descend [d]

FAIR = 3.0  # with robust updates: most that a client counts for by the samples or steps it reports, in median clients


class Trained(NamedTuple):
    """Weights [d] after local training, the mean loss met on the way, and batch normalisation's statistics, if any."""

    weights: Tensor
    loss: Tensor
    statistics: State


def train_locally(
    task: Task,
    start: Tensor,
    client: ClientRound,
    steps: int,
    lr: float,
    batch_size: int,
    adjust: Adjustment | None = None,
) -> Trained:
    """`steps` steps v ← v − lr g from `start` [d]; g is the gradient of a batch's mean loss, which `adjust` may change
    (FedProx, SCAFFOLD).

    Batches are drawn without replacement, epoch after epoch, from the client's own randomness; a client with no more
    samples than `batch_size` uses all of them in each step. The network is in training mode. Dropout draws from torch's
    generator, seeded by the client's randomness: it repeats, and is no secret. Cost: `steps` gradient passes.
    """
    model, Y, losses = task.at(start), task.training_targets(client.y), []
    parameters, before = list(trainable(model).values()), statistics_of(model)
    modes = [(module, module.training) for module in model.modules()]
    devices = [start.device] if start.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(client.randomness.seed("dropout"))
        model.train()
        try:
            for rows in batches(client, steps, batch_size):
                x, y = (client.x, Y) if rows is None else (client.x[rows], Y[rows])
                with torch.enable_grad():
                    loss = per_sample(task.loss, model(x), y).mean()
                    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
                losses.append(loss.detach())
                if adjust is not None:
                    flat = adjust(torch.cat([g.reshape(-1) for g in gradients]), flatten(model))
                    gradients = torch.split(flat, [p.numel() for p in parameters])
                with torch.no_grad():
                    for p, g in zip(parameters, gradients, strict=True):
                        p.sub_(lr * g.view_as(p))
        except ValueError as error:  # batch normalisation refuses a batch of one sample
            raise ModelError(f"client {client.id} cannot train this model: {error}; use nn.GroupNorm") from None
        finally:
            for module, mode in modes:
                module.training = mode
    after = statistics_of(model)
    load_statistics(model, before)  # the next client begins from the broadcast ones
    return Trained(flatten(model), torch.stack(losses).mean() if losses else start.new_zeros(()), after)


def batches(client: ClientRound, steps: int, batch_size: int) -> Sequence[Tensor | None]:
    """Rows [b] of each step; None where a step uses all."""
    n = len(client)
    if n <= batch_size:
        return [None] * steps
    per_epoch = n // batch_size
    orders = torch.from_numpy(client.randomness.orders("batches", -(-steps // per_epoch), n))
    return list(orders[:, : per_epoch * batch_size].reshape(-1, batch_size)[:steps].to(client.x.device))


class LocalTraining(Method):
    """Options of every method whose clients train locally, and what their rounds begin and end with.

    A method of this kind is one exchange, three calls at the server and three at a client:

        replies = yield self.question(state, round)             w = self.begin(task, question)
        p = self.shares(task, replies)                          trained = self.train(task, w, client)
        v = self.combined(task, replies, p, "weights", w)       return self.update(client, trained, weights=…)
        return self.outcome(replies, p, state | {…})

    What differs is what a client sends, and what the server makes of the mean.
    """

    replies: ClassVar[Mapping[str, type[Update]]] = {"weights": Update}

    lr: float = Field(0.1, gt=0, description="local learning rate")
    local_steps: int = Field(20, ge=1, description="gradient steps a client takes in a round")
    local_epochs: int | None = Field(None, ge=1, description="passes over a client's samples, in place of local_steps")
    batch_size: int = Field(200, ge=1, description="samples in a local step; a smaller client uses all it has")
    weighting: Literal["samples", "uniform"] = Field(
        "uniform", description="clients count by their samples, or equally"
    )

    # The server's side.

    def start(self, task: Task, weights: Tensor) -> State:
        """With the network's statistics [b], where it has batch normalisation."""
        return super().start(task, weights) | statistics_of(task.model)

    def question(self, state: State, round: int, **more: Tensor) -> Message:
        """What all clients begin from: the weights, batch normalisation's statistics, and `more`."""
        arrays = {name: state[name] for name in (WEIGHTS, STATISTICS) if name in state}
        return Message("weights", round, arrays | more)

    def shares(self, task: Task, replies: Sequence[Update]) -> Tensor:
        """p_m, summing to one: uniform, or in proportion to the samples that clients report. [M]

        Reports may be false: with robust updates a client counts for three median ones at most.
        """
        samples = torch.tensor([float(reply.samples) for reply in replies]).to(task.like)
        if task.robust.updates != "mean":
            samples = fair_counts(samples, FAIR)
        p = samples if self.weighting == "samples" else torch.ones_like(samples)
        return p / p.sum()

    def combined(
        self, task: Task, replies: Sequence[Update], p: Tensor, name: str, base: Tensor | None = None
    ) -> Tensor:
        """Σ_m p_m v_m over the vectors `name`, or what `[robust] updates` makes of their changes from `base`: [d]."""
        return task.robust.combine([reply.vector(name, task.like) for reply in replies], p, base)

    def outcome(self, replies: Sequence[Update], p: Tensor, state: State, **notes: float) -> Outcome:
        """The round's end: the new state, with the mean of the clients' statistics, and the clients' mean loss."""
        check_finite(state[WEIGHTS], "the new model")
        after = [reply.take(STATISTICS).to(p) for reply in replies if STATISTICS in reply.arrays]
        if after and len(after) == len(replies):
            state = state | {STATISTICS: torch.stack(after).mean(0)}
        losses = [reply.loss for reply in replies if reply.loss is not None]
        mean = float(torch.tensor(losses).to(p) @ p) if len(losses) == len(replies) else None
        return Outcome(state, mean, diagnostics=dict(notes))

    # A client's side.

    def begin(self, task: Task, question: Message) -> Tensor:
        """The weights w [d] to train from; loads the statistics that come with them."""
        own = {n: question.vector(n, v) for n, v in statistics_of(task.model).items() if n in question.arrays}
        load_statistics(task.model, own)
        return question.of_kind("weights").vector(WEIGHTS, task.like)

    def train(self, task: Task, w: Tensor, client: ClientRound, adjust: Adjustment | None = None) -> Trained:
        """Where the client's steps from w end."""
        trained = train_locally(task, w, client, self.steps(client), self.lr, self.batch_size, adjust)
        check_finite(trained.weights, f"the local model of client {client.id}")
        check_finite(trained.loss, f"the local loss of client {client.id}")
        return trained

    def update(self, client: ClientRound, trained: Trained, **arrays: Tensor) -> Update:
        """The client's reply: these arrays, its samples, loss and statistics."""
        return self.replies["weights"].of(client, trained.loss, **arrays, **trained.statistics)

    def steps(self, client: ClientRound) -> int:
        """τ_m, the client's gradient steps in a round."""
        if self.local_epochs is not None:
            return self.local_epochs * -(-len(client) // self.batch_size)
        return self.local_steps
