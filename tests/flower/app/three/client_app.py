"""A client of the three runs: the server's config says which network and data are asked."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ntkfl.flower import reply
from tests.flower.cases import SEED, THREE, samples

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    _, make, shape, _ = THREE[int(msg.content["config"]["case"])]
    data = samples(2, shape)[int(context.node_config["partition-id"])]
    return reply(msg, context, make(), data, seed=SEED)
