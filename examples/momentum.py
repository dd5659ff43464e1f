"""Momentum in two places of FedAvg: the server's step changed, and the clients' local steps."""

import torch
from pydantic import Field

import ntkfl
from ntkfl.methods import FedAvg
from ntkfl.methods.averaging.local_training import Trained, batches
from ntkfl.tangent.parameters import flatten


class ServerMomentum(FedAvg):
    """FedAvgM, Hsu et al. 2019: v ← β v + w̄ − w, then w ← w + v, where w̄ is the clients' mean."""

    momentum: float = Field(0.9, ge=0, lt=1, description="β, memory of earlier updates")

    def start(self, task, weights):
        return super().start(task, weights) | {"velocity": torch.zeros_like(weights)}

    def round(self, task, state, round, cohort):
        outcome = yield from super().round(task, state, round, cohort)
        w, mean = state["weights"], outcome.state["weights"]
        velocity = self.momentum * state["velocity"] + mean - w
        outcome.state |= {"weights": w + velocity, "velocity": velocity}
        return outcome


class ClientMomentum(FedAvg):
    """FedAvg whose local steps have momentum: v ← β v + ∇L_m(w), then w ← w − lr v."""

    momentum: float = Field(0.9, ge=0, lt=1, description="β, memory within a round")

    def train(self, task, w, client, adjust=None):
        model, losses = task.at(w), []
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)
        for rows in batches(client, self.steps(client), self.batch_size):
            x, y = (client.x, client.y) if rows is None else (client.x[rows], client.y[rows])
            loss = task.losses(model(x), y).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return Trained(flatten(model), torch.stack(losses).mean(), None)


if __name__ == "__main__":
    fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=20, alpha=0.3), seed=0)
    for method in (FedAvg(), ServerMomentum(momentum=0.5), ClientMomentum(momentum=0.5)):
        run = ntkfl.train(ntkfl.models.mlp(64, 32, 10), fed, method, rounds=10, clients_per_round=10, callbacks=[])
        print(f"{type(method).__name__}: {run.history[-1]['test_accuracy']:.1%}")
