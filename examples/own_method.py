"""A method of your own: signSGD with majority vote. Bernstein et al., signSGD, 2018.

On the command line, in this folder: ntkfl train --method own_method:SignSGD --set lr=0.01 --dataset digits
"""

from typing import ClassVar

import torch
from pydantic import Field

import ntkfl
from ntkfl.methods import Method, Outcome
from ntkfl.methods.replies import Update
from ntkfl.wire import Message


class Signs(Update):
    """The sign of each of a gradient's numbers, one byte per weight."""

    vectors = ("signs",)


class SignSGD(Method):
    """w ← w − lr · sign(Σ_m sign(∇L_m(w))): a client sends a sign for each weight, and the majority decides."""

    replies: ClassVar = {"weights": Signs}
    lr: float = Field(0.01, gt=0, description="how far each weight moves in a round")

    def round(self, task, state, round, cohort):
        w = state["weights"]
        replies = yield Message("weights", round, {"weights": w})
        votes = sum(reply.vector("signs", w) for reply in replies)
        return Outcome({"weights": w - self.lr * votes.sign()}, train_loss=None)

    def answer(self, task, question, client):
        model = task.at(question.take("weights", like=task.like))
        loss = task.losses(model(client.x), client.y).mean()
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        return Signs.of(client, signs=gradient.sign().to(torch.int8))


if __name__ == "__main__":
    torch.manual_seed(0)
    fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=20, alpha=1.0), seed=0)
    run = ntkfl.train(ntkfl.models.mlp(64, 32, 10), fed, SignSGD(lr=0.01), rounds=30, clients_per_round=10)
    print(f"accuracy after 30 rounds of one byte per weight: {run.history[-1]['test_accuracy']:.1%}")
