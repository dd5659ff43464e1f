"""One of the five: its folder is named in its node's config."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ntkfl.flower import Shuffler, reply
from tests.flower.test_consortium import net, pairs

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    data = pairs()[int(context.node_config["partition-id"])]
    return reply(msg, context, net(), data, through=Shuffler.from_config(context))
