"""Refit the head of a model that FedAvg trained: one round of sums, and no gradient.

The trunk stays as it is. Each client sends the sums of its head inputs (85 × 85 of a LeNet) and of their products with
the labels; the server solves ridge regression for the last layer over all clients' samples at once. The result is that
of pooled data, so it undoes what heterogeneous clients did to the head.

    python examples/flower/refit.py [digits | fashion-mnist]        (Flower's simulation: ten clients, Dirichlet 0.1)
"""

import sys
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

import ntkfl.flower

sys.path.append(str(Path(__file__).parent / "quickstart"))  # the network and the data are the quickstart's
from quickstart.task import Net, accuracy, fit, load_data, load_test

DATASET = sys.argv[1] if len(sys.argv) > 1 else "digits"
DATA = {"dataset": DATASET, "clients": 10, "samples": 1000, "seed": 0}
client, server = ClientApp(), ServerApp()


@client.train()
def train(msg: Message, context: Context) -> Message:
    model, (loader, _) = Net(DATASET), load_data(DATA, int(context.node_config["partition-id"]))
    if msg.content["config"].get("refit"):
        return ntkfl.flower.reply(msg, context, model, loader)
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    fit(model, loader, epochs=5, lr=0.1)
    metrics = MetricRecord({"num-examples": len(loader.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)


@server.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    net, test = Net(DATASET), load_test(DATA)

    def score(arrays: ArrayRecord) -> float:
        net.load_state_dict(arrays.to_torch_state_dict())
        return 100 * accuracy(net, test)[0]

    fedavg = FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(net.state_dict()), num_rounds=10)
    before = score(fedavg.arrays)

    strategy = ntkfl.flower.Strategy(ntkfl.methods.SumRidge(), net, fraction_evaluate=0.0)
    refit = strategy.start(grid, fedavg.arrays, num_rounds=1, train_config=ConfigRecord({"refit": True}))
    sent = refit.train_metrics_clientapp[1]
    print(f"FedAvg, ten rounds: {before:.1f}%", flush=True)
    print(f"refit in one round: {score(refit.arrays):.1f}% (up {sent['uplink_bytes'] / 1e6:.2f} MB,", end=" ")
    print(f"down {sent['downlink_bytes'] / 1e6:.2f} MB)", flush=True)


if __name__ == "__main__":
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=10, backend_config=resources)
