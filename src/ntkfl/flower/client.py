"""A client's side: what `@app.train()` returns."""

from __future__ import annotations

import copy
import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from torch import Tensor, nn

from ntkfl.crypto.context import bind
from ntkfl.data.own import Array, Pair, TorchData, read_source
from ntkfl.errors import ConfigError, DataError, ModelError, Refused
from ntkfl.federation.client import Client, Draws, seeded, seeded_torch, split_frozen
from ntkfl.federation.policy import Agreed, Site, Terms
from ntkfl.flower.messages import NOTES, Notes, content, digest, needs_shuffler, note, payload_of
from ntkfl.methods import State, Task
from ntkfl.models.backbone import outputs_of
from ntkfl.privacy.randomness import KEY_BYTES, Randomness
from ntkfl.tangent.parameters import eager, flatten, full_precision
from ntkfl.wire import Message as WireMessage

log = logging.getLogger("flwr")
Batch = tuple[Tensor, Tensor]
_STATE, _MEMORY, _SITE = "ntkfl", "ntkfl.memory.", "ntkfl.site"  # records of `context.state`


def reply(
    msg: Message,
    context: Context,
    model: nn.Module,
    data: TorchData | tuple[Array, Array],
    *,
    batch: Pair | None = None,
    seed: int | None = None,
    through: Any = None,
    policy: Path | str | None = None,
) -> Message:
    """The answer to a question of `ntkfl.flower.Strategy`.

        @app.train()
        def train(msg, context):
            return ntkfl.flower.reply(msg, context, Net(), trainloader)

    `model` is the network of the server's strategy: with any weights where it trains, with the server's where it does
    not. `data` is a DataLoader, a torch Dataset or (x, y) with x [n, …] and y as classes [n] or real targets [n, d2]; a
    loader is read once for each question, its transforms as they are. `batch` makes (x, y) of what a loader yields,
    such as a dictionary. The method and its options come with the question. `through` is a shuffler, for methods that
    need one. A site's `policy` (a file; or `policy` in Flower's node config, or NTKFL_POLICY) decides what leaves,
    before anything is computed.

    `context.state` has what the method keeps between rounds, and a secret key from which all randomness follows: a
    question that comes again gets the same answer. With `seed` it follows from that and from the client's number
    (`partition-id`, or the node's id), as in a simulation.
    """
    site = Site.of(context.node_config, context.node_id, policy, context.state.setdefault(_SITE, ConfigRecord()))
    if msg.content.config_records.get(NOTES, ConfigRecord()).get("ask") == "shape":  # before there are terms
        with _errors_stay_here(site):
            x, y = read_source("this client's data", data, None, batch)
        shape: Notes = {"inputs": list(x.shape[1:]), "tokens": not x.is_floating_point(), "real": y.is_floating_point()}
        return Message(content(shape), reply_to=msg)
    question, terms = payload_of(msg), Terms.parse(note(msg, "terms", str))
    run, exchange = note(msg, "run", str), note(msg, "exchange", int)
    agreed = site.admit(terms, run, "" if through is None else through.digest, seed is not None)
    method, privacy = agreed
    if needs_shuffler(privacy) and through is None:
        raise ConfigError(f"{method.name} with these settings needs a shuffler: give reply(…, through=…)")
    key = _enter(context, run)
    number = int(context.node_config.get("partition-id", context.node_id))
    drawn = _keyed(key, number) if seed is None else seeded(seed, number)
    with full_precision(), eager(model) as own:
        fitted = own
        if flatten(own).dtype != (dtype := getattr(torch, terms.precision)):
            fitted = copy.deepcopy(own).to(dtype)
        if digest(fitted, method) != note(msg, "network", str):
            raise ModelError(
                "the model is not the server's: names or shapes of its parameters differ, or which of them train, or "
                "the values of those that do not (load the same ones at both ends)"
            )
        asked = WireMessage.decode(question) if through is None else through.heed(question, run, terms)

        def answer() -> bytes:
            """The reply's bytes: for the server, or sealed for the shuffler."""
            x, y = _placed(*read_source("this client's data", data, None, batch), fitted, agreed, terms, through)
            # Where noise is real, features are not cached: a batch of samples is rounded together.
            private = privacy.noisy and seed is None
            trained, features = (fitted, None) if private else split_frozen(fitted, privacy)
            x = x if features is None else features(x)
            task = Task(trained, terms.outputs, method.loss, label_smoothing=method.label_smoothing, privacy=privacy)
            task.example, task.one_by_one = (torch.zeros_like(x[:1]), torch.zeros_like(y[:1])), private
            at, rows = (asked.round, exchange), None if through is None else through.rows(agreed)
            kept = _remembered(context, at)
            found = Client(number, task, method, lambda: (x, y), drawn, memory=kept, rows=rows).answer(asked)
            _remember(context, at, kept)
            return found.encode() if through is None else through.seal(found, method, task, randomness)

        # What a user's own code draws from torch follows from the round: a loader that shuffles reads the same samples
        # in the same order for all questions of a round.
        randomness = drawn(asked.round)[0]
        with seeded_torch(flatten(fitted).device, randomness.seed("batches")), _errors_stay_here(site):
            payload = site.release(run, asked.round, exchange, question, answer)
    if through is not None:
        payload = through.deliver(payload, privacy.secure_sum)  # its receipt
    return Message(content({}, payload), reply_to=msg)


@contextmanager
def _errors_stay_here(site: Site) -> Iterator[None]:
    """Under a policy the server learns that a client failed, and not why: what an error says of data has no ε."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        if site.simulated:
            raise
        log.exception("this client could not answer")
        raise Refused("client", f"failed with {type(error).__name__}: see the log of this site") from None


def _enter(context: Context, run: str) -> bytes:
    """This client's key for the run. Another run's memory is dropped."""
    state = context.state.config_records.get(_STATE, ConfigRecord())
    if state.get("run") != run:
        for name in _memories(context).values():
            del context.state[name]
        state = ConfigRecord({"run": run, "key": os.urandom(KEY_BYTES)})
        context.state[_STATE] = state
    return bytes(state["key"])  # type: ignore[arg-type]


def _placed(x: Tensor, y: Tensor, model: nn.Module, agreed: Agreed, terms: Terms, through: Any) -> Batch:
    """Samples as the network gets them, in its precision, on its device, projected. `DataError` unless x is
    [n, *inputs], and y classes [n] below `outputs` or real [n, outputs].
    """
    if tuple(x.shape[1:]) != terms.inputs:
        raise DataError(f"inputs of shape {list(x.shape[1:])}; the run's terms say {list(terms.inputs)}")
    if y.is_floating_point() and y.shape[1] != terms.outputs:
        raise DataError(
            f"targets of shape {list(y.shape)}; the run's terms say {terms.outputs} outputs (of classes, y.long())"
        )
    if not y.is_floating_point() and not 0 <= int(y.min()) <= int(y.max()) < terms.outputs:
        raise DataError(f"labels {int(y.min())} to {int(y.max())}; the run's terms say {terms.outputs} classes")
    like = flatten(model)
    x, y = (t.to(like.device, like.dtype if t.is_floating_point() else t.dtype) for t in (x, y))
    if agreed.privacy.projected_dim is not None:
        projection = agreed.privacy.make_projection(through.run_secret(), terms.inputs)
        assert projection is not None
        x = projection(x)
    if (outputs := outputs_of(model, x[:1])) != terms.outputs:
        raise ModelError(f"the model has {outputs} outputs; the run's terms say {terms.outputs}")
    return x, y


def _keyed(key: bytes, number: int) -> Draws:
    """From this client's secret key of the run: nobody else can know it, and a question that comes again finds it."""

    own = Randomness(key)

    def draws(round: int) -> tuple[Randomness, random.Random]:
        of_round = own.for_question(bind("ntkfl flower v2", number, round))
        return of_round, random.Random(of_round.words("samples", 4).tobytes())  # which were drawn never shows

    return draws


def _remembered(context: Context, at: tuple[int, int]) -> State:
    """What this client kept between rounds, as it was before the question `at` (round, exchange): one that comes again
    finds what it found at first.
    """
    steps = _memories(context)
    past = [step for step in steps if step < at]
    return dict(context.state.array_records[steps[max(past)]].to_torch_state_dict()) if past else {}


def _remember(context: Context, at: tuple[int, int], memory: State) -> None:
    """What the question `at` leaves behind; of earlier rounds the last state stays, and of this one all steps."""
    steps, (round, exchange) = _memories(context), at
    last = max((step for step in steps if step[0] < round), default=None)
    for step, name in steps.items():
        if step != last and not (round, 0) <= step < at:
            del context.state[name]
    if memory:
        context.state[f"{_MEMORY}{round}.{exchange}"] = ArrayRecord({n: t.detach().cpu() for n, t in memory.items()})


def _memories(context: Context) -> dict[tuple[int, ...], str]:
    """Records of what this client keeps, by the (round, exchange) that left it."""
    names = [name for name in context.state.array_records if name.startswith(_MEMORY)]
    return {tuple(map(int, name.removeprefix(_MEMORY).split("."))): name for name in names}
