"""One client: trains on its own images, evaluates on those it held out."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart.task import Net, accuracy, fit, load_data

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    config = context.run_config
    model, (loader, _) = Net(config["dataset"]), load_data(config, int(context.node_config["partition-id"]))
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loss = fit(model, loader, config["epochs"], config["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    config = context.run_config
    model, (_, loader) = Net(config["dataset"]), load_data(config, int(context.node_config["partition-id"]))
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    share, count = accuracy(model, loader)
    return Message(RecordDict({"metrics": MetricRecord({"accuracy": share, "num-examples": count})}), reply_to=msg)
