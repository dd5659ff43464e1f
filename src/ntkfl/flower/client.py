"""A client's side: what `@app.train()` returns."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from torch import Tensor, nn

from ntkfl.crypto.context import bind
from ntkfl.data.from_arrays import Array, checked_pair
from ntkfl.data.torch_data import TorchData, read_torch, varies
from ntkfl.errors import ConfigError, DataError, MessageError, ModelError, TrustError
from ntkfl.federation.client import Batch, Client, SeededRandomness, check_data
from ntkfl.federation.feature_cache import feature_folder, split_frozen
from ntkfl.federation.seeds import seeded_torch
from ntkfl.flower import network
from ntkfl.flower.records import FROZEN, content, note, notes_of, payload_of, tensors_of
from ntkfl.flower.terms import Terms, build
from ntkfl.methods import Method, State, Task
from ntkfl.privacy.randomness import KEY_BYTES, Randomness
from ntkfl.tangent.parameters import eager, flatten, full_precision
from ntkfl.wire import Message as WireMessage

log = logging.getLogger("flwr")
Source = TorchData | tuple[Array, Array]
_STATE, _MEMORY = "ntkfl", "ntkfl.memory"  # records of `context.state`


def reply(
    msg: Message,
    context: Context,
    model: nn.Module,
    data: Source,
    *,
    batch: Callable[[Any], tuple[Any, Any]] | None = None,
    seed: int | None = None,
    through: Any = None,
) -> Message:
    """The answer to a question of `ntkfl.flower.Strategy`.

        @app.train()
        def train(msg, context):
            return ntkfl.flower.reply(msg, context, Net(), trainloader)

    `model` is the network of the server's strategy, with any weights. `data` is a DataLoader, a torch Dataset or (x, y)
    with x [n, …] and y as classes [n] or real targets [n, d2]; a loader is read once for each question, its transforms
    as they are. `batch` makes (x, y) of what a loader yields, such as a dictionary. The method and its options come
    with the question. `context.state` keeps what the method keeps between rounds, and a secret key from which all
    randomness of a round follows, so that a question that comes again gets the same answer; with `seed`, randomness
    follows from that and from the client's number, as in a simulation.
    """
    notes = notes_of(msg)
    if notes.get("ask") == "shape":
        x, y = _read(data, batch)
        return Message(content({"inputs": list(x.shape[1:]), "tokens": not x.is_floating_point()}), reply_to=msg)
    question = payload_of(msg)
    terms = Terms.parse(str(note(notes, "terms", str)))
    run, exchange = str(note(notes, "run", str)), int(note(notes, "exchange", int))  # type: ignore[call-overload]
    method = build(terms)
    key = _enter(context, run, terms)
    if (method.shuffle or method.secure_sum or method.projected_dim is not None) and through is None:
        raise ConfigError(f"{method.name} with these options needs a shuffler: give reply(…, through=…)")
    asked = WireMessage.decode(question) if through is None else through.heed(question)
    number = int(context.node_config.get("partition-id", context.node_id))
    reading = key if seed is None else f"{seed}/{number}".encode()
    with full_precision(), eager(model) as own, _drawing(reading, asked.round, flatten(model).device):
        fitted = _fitted(own, method, terms, msg, context)
        if fitted is None:
            return Message(content({"wants": FROZEN}), reply_to=msg)
        x, y = _placed(*_read(data, batch), fitted, method, terms, through)
        if asked.round == 1 and exchange == 0 and not method.trains_locally and _changes(data, batch):
            log.warning("samples change when they are read again, as by a random transform: %s sums over one draw of "
                        "each in every round", method.name)
        trained, features = split_frozen(fitted, method, feature_folder())
        x = x if features is None else features(x)
        task = Task(trained, terms.outputs, method.loss, label_smoothing=method.label_smoothing)
        memory = ContextMemory(context, (asked.round, exchange))
        drawn = _KeyedRandomness(key, number) if seed is None else SeededRandomness(seed, number)
        answer = Client(number, task, method, lambda: (x, y), drawn, memory=memory).answer(asked)
    payload = answer.encode() if through is None else through.deliver(answer)
    return Message(content({"keeps": memory.kept}, payload), reply_to=msg)


def _enter(context: Context, run: str, terms: Terms) -> bytes:
    """This client's secret key. A new run forgets the memory of the last; terms that change within one are refused."""
    state = context.state.config_records.get(_STATE, ConfigRecord())
    key = state.get("key")
    key = key if isinstance(key, bytes) and len(key) == KEY_BYTES else os.urandom(KEY_BYTES)
    if state.get("run") != run:
        for name in (_MEMORY, FROZEN):
            context.state.pop(name, None)
    elif state.get("terms") != terms.digest:
        raise TrustError("the run's terms differ from those that it began with: the question is refused")
    context.state[_STATE] = ConfigRecord({"key": key, "run": run, "terms": terms.digest})
    return key


def _read(data: Source, batch: Callable[[Any], tuple[Any, Any]] | None) -> Batch:
    """x [n, …], floating or (tokens) int64, and y: int64 [n] or float [n, d2]."""
    if isinstance(data, tuple | list):
        if batch is not None:
            raise ConfigError("batch= is for loaders and datasets: (x, y) is what it would make")
        pair = tuple(data)
    else:
        pair = read_torch("this client's data", data, batch)
    if len(pair) != 2:
        raise DataError(f"data must be a pair (x, y), a torch Dataset or a DataLoader, not {len(pair)} things")
    whole = str(getattr(pair[0], "dtype", "")).rpartition(".")[2] in ("int32", "int64")
    return checked_pair("this client's data", pair, tokens=whole)


def _changes(data: Source, batch: Callable[[Any], tuple[Any, Any]] | None) -> bool:
    return not isinstance(data, tuple | list) and varies(data, batch)


def _fitted(model: nn.Module, method: Method, terms: Terms, msg: Message, context: Context) -> nn.Module | None:
    """A model as the server has it, but for the weights in its question; None where what does not train differs, and
    the server has to send it.
    """
    notes = notes_of(msg)
    if network.layout(model) != note(notes, "layout", str):
        raise ModelError("the parameters that train differ from those of the server's model: build the same network")
    dtype = getattr(torch, terms.precision)
    if flatten(model).dtype != dtype:
        model = copy.deepcopy(model).to(dtype)
    own, expected = network.frozen(model, method), note(notes, "frozen", str)
    if network.digest(own) == expected:
        return model
    if FROZEN in msg.content:
        sent = tensors_of(msg, FROZEN)
        context.state[FROZEN] = msg.content[FROZEN]
    elif FROZEN in context.state:
        sent = dict(context.state.array_records[FROZEN].to_torch_state_dict())
    else:
        return None
    if network.digest(sent) != expected:
        raise MessageError("the weights that do not train are not those of the run's terms")
    model = copy.deepcopy(model)
    network.load(model, sent, own, "the server's weights that do not train")
    return model


def _placed(x: Tensor, y: Tensor, model: nn.Module, method: Method, terms: Terms, through: Any) -> Batch:
    """Samples as the network gets them: checked against the terms, in its precision, on its device, projected."""
    check_data(x, y, terms.inputs, terms.outputs)
    like = flatten(model)
    x = x.to(like.device, like.dtype if x.is_floating_point() else x.dtype)
    y = y.to(like.device, like.dtype if y.is_floating_point() else y.dtype)
    if method.projected_dim is not None:
        projection = method.make_projection(through.run_secret(), terms.inputs)
        assert projection is not None
        x = projection(x)
    if (outputs := network.outputs_of(model, x[:1])) != terms.outputs:
        raise ModelError(f"the model has {outputs} outputs; the run's terms say {terms.outputs}")
    return x, y


@contextmanager
def _drawing(key: bytes, round: int, device: torch.device) -> Iterator[None]:
    """Within it torch, numpy and `random` draw from this key and round; after it they are as before. So a loader that
    shuffles or augments reads the same samples for every question of a round.
    """
    root = int.from_bytes(hashlib.sha256(bind("ntkfl flower reading v1", key, round)).digest()[:4], "big")
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002 - what users' transforms draw from
    with seeded_torch(device, root):
        random.seed(root)
        np.random.seed(root)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)  # noqa: NPY002


class _KeyedRandomness:
    """From a secret key of this client and run: nobody else can know it, and a question that comes again finds it."""

    def __init__(self, key: bytes, number: int) -> None:
        self.key, self.number = key, number

    def _of(self, what: str, round: int) -> bytes:
        return hashlib.sha256(bind(f"ntkfl flower {what} v1", self.key, self.number, round)).digest()

    def subsampling(self, round: int) -> random.Random:
        return random.Random(self._of("subsample", round))  # which samples were drawn is never seen

    def of_round(self, round: int) -> Randomness:
        return Randomness(self._of("round", round))


class ContextMemory:
    """What a client keeps between rounds, in `context.state`: as it was after the last question of earlier rounds, and
    after each of this round. A question `at` (round, exchange) that comes again finds what it found at first.
    """

    def __init__(self, context: Context, at: tuple[int, int]) -> None:
        self.context, self.at = context, at
        self.steps: dict[tuple[int, int], State] = {}
        record = context.state.array_records.get(_MEMORY, ArrayRecord())
        for key, tensor in record.to_torch_state_dict().items():
            round, exchange, name = key.split("/", 2)
            self.steps.setdefault((int(round), int(exchange)), {})[name] = tensor

    @property
    def kept(self) -> bool:
        """Whether this client keeps anything."""
        return bool(self.steps)

    def before(self, round: int) -> State:
        past = [step for step in self.steps if step < self.at]
        return dict(self.steps[max(past)]) if past else {}

    def keep(self, round: int, memory: State) -> None:
        if not memory and not self.steps:
            return
        last = max((step for step in self.steps if step[0] < round), default=None)
        self.steps = {s: kept for s, kept in self.steps.items() if s == last or (s[0] == round and s < self.at)}
        self.steps[self.at] = {name: t.detach().cpu().clone() for name, t in memory.items()}
        tensors = {f"{r}/{e}/{name}": t for (r, e), kept in self.steps.items() for name, t in kept.items()}
        self.context.state[_MEMORY] = ArrayRecord(tensors)
