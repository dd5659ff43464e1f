"""The server: FedAvg over all clients, and the accuracy on test images after every round."""

import json
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart.task import Net, accuracy, load_test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    torch.manual_seed(config["seed"])
    net, test, rounds = Net(config["dataset"]), load_test(config), []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        net.load_state_dict(arrays.to_torch_state_dict())
        rounds.append({"round": number, "accuracy": accuracy(net, test)[0], "time": time.time()})
        return MetricRecord({"accuracy": rounds[-1]["accuracy"]})

    strategy = FedAvg(fraction_train=1.0)
    strategy.start(grid, ArrayRecord(net.state_dict()), num_rounds=config["num-rounds"], evaluate_fn=evaluate)
    if config["out"]:
        Path(config["out"]).write_text(json.dumps(rounds))
