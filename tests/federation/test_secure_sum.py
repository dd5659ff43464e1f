"""Secure sums: exactly the sum of those that submitted, for every method that has one, and nothing below the floor."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ntkfl
from ntkfl.crypto.hpke import SealingKey
from ntkfl.errors import MessageError, Refused
from ntkfl.federation.byzantine import Byzantine
from ntkfl.federation.secure_sum import open_sum
from ntkfl.federation.server import remarks
from ntkfl.federation.simulation import Simulation
from ntkfl.methods import METHODS, FedAvg, Method, Privacy, SumNTKFL
from ntkfl.methods.replies import Addend
from ntkfl.privacy.randomness import Randomness
from ntkfl.services.store import BatchStore
from ntkfl.wire import Message
from tests.federation.masked import KEY, NAMES, SAID, Round, played, schema_of, words_of
from tests.federation.rounds import lying, scaled, small_client, small_task

CLIENTS = ("ada", "bob", "cyd", "dan")


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_masked_sum_is_the_plain_sum_for_every_set_of_clients(data: st.DataObject) -> None:
    """Below the floor there is nothing: no rows, no masks."""
    schema = schema_of(data.draw(st.integers(1, 6)), len(CLIENTS))
    number = st.integers(-(2**28), 2**28)
    least = data.draw(st.integers(2, 4))
    own = Round(schema, CLIENTS, least)
    some = data.draw(st.sets(st.sampled_from(CLIENTS)))
    vectors = {client: data.draw(st.lists(number, min_size=schema.numbers, max_size=schema.numbers)) for client in some}
    for client, vector in vectors.items():
        own.submit(client, words_of([0, *vector[1:]]))
    if len(some) < least:
        with pytest.raises(Refused, match="release needs"):
            own.shuffler.release(KEY)
        return
    (sums, _) = own.total()
    assert len(own.sealed) == len(some)
    plain = [sum(column) for column in zip(*vectors.values(), strict=True)]
    assert (sums["vector"].numpy() * schema.scales()[1:]).tolist() == plain[1:]


def test_real_numbers_arrive_within_their_rounding() -> None:
    """Each of k clients is off by less than one unit of 1/scale; those that were bounded are counted."""
    summands = [{"vector": Addend(torch.rand(50).double(), 3.0)} for _ in range(3)]
    summands[1]["vector"].values[7] = 6.0
    schema = schema_of(50, 3, 3.0)
    own = Round(schema, CLIENTS[:3])
    for i, summand in enumerate(summands):
        own.submit(CLIENTS[i], schema.encode(summand, Randomness.simulated(i)))
    sums, bounded = own.total()
    expected = summands[0]["vector"].values + summands[1]["vector"].values / 2 + summands[2]["vector"].values
    assert bounded == 1
    assert float((sums["vector"] - expected).abs().max()) < 3 / schema.scales()[1]


def test_a_vector_that_does_not_open_spoils_the_sum_and_says_so() -> None:
    """Its mask is in the masks' sum: what is left without it is noise, so there is no result at all."""
    own = played({name: words_of([0] * 65) for name in CLIENTS})
    own.release()
    for schema, opener in ((own.schema, SealingKey.generate()), (schema_of(5, 4), own.opener)):
        with pytest.raises(MessageError, match="cannot be read, and the sum not without it"):
            open_sum(schema, own.sealed, own.masks, opener, *NAMES, SAID)
    with pytest.raises(MessageError, match="beyond what its clients' limits allow"):
        open_sum(own.schema, own.sealed[1:], own.masks, own.opener, *NAMES, SAID)


def test_a_sum_beyond_the_limits_is_refused() -> None:
    """All that can be checked of a sum: two clients of four that keep to their limits make at most twice that."""
    schema = schema_of(1, 4, 1000.0)
    over = int(2 * 1000 * schema.scales()[1]) + 3
    own = Round(schema, CLIENTS)
    for name, value in (("ada", over), ("bob", 0)):
        own.submit(name, words_of([0, value]))
    with pytest.raises(MessageError, match="one of them did not keep to its own"):
        own.total()


# -- Methods -----------------------------------------------------------------------------------------------------------


MASKED = Privacy(secure_sum=True)


def trained(digits: ntkfl.data.Federated, method: Method, rounds: int = 3, **options: Any) -> ntkfl.Run:
    torch.manual_seed(0)
    model = ntkfl.models.mlp(64, 16, 10).double()
    how = {"clients_per_round": 4, "privacy": MASKED} | options
    return Simulation(model, digits, method, **how).run(rounds, callbacks=[])


def weights(run: ntkfl.Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


@pytest.mark.parametrize("method", [FedAvg(weighting="samples"), SumNTKFL()], ids=lambda method: method.name)
def test_a_large_client_counts_for_a_bounded_number_of_samples(method: Method) -> None:
    task = small_task(method, Privacy(secure_sum=True, sum_samples=8))
    question = next(method.round(task, method.start(task, task.like), 1, range(2)))
    assert isinstance(question, Message)
    replies = [method.answer(task, question, small_client(0, samples)) for samples in (80, 4)]
    large, small = (reply.addends(method, task, question) for reply in replies)
    assert (float(large["samples"].values), float(small["samples"].values)) == (8.0, 4.0)
    if method.name == "fedavg":
        first, second = (reply.arrays["weights"] - task.like for reply in replies)
        assert torch.allclose(large["weights"].values, first)
        assert torch.allclose(small["weights"].values, 4 / 8 * second)
    else:
        assert torch.allclose(large["gradient"].values, 8 / 80 * replies[0].arrays["gradient"].double())
        assert torch.allclose(small["gradient"].values, replies[1].arrays["gradient"].double())


def told(fed: ntkfl.data.Federated, method: Method, privacy: Privacy) -> tuple[list[str], list[str]]:
    """What a run of a round says of clients that count for less: before it, and of its round."""
    notes: list[str] = []
    torch.manual_seed(0)
    callback, model = SimpleNamespace(on_start=notes.append), ntkfl.models.mlp(64, 16, 10)
    run = ntkfl.train(model, fed, method, rounds=1, callbacks=[callback], privacy=privacy)
    return [note for note in notes if "sum_samples" in note], remarks(run.history[0])


@pytest.mark.parametrize("method", [SumNTKFL(), FedAvg(weighting="samples", local_steps=2), METHODS["private-sums"]()])
def test_clients_of_more_than_sum_samples_records_are_told_of_by_that_name(method: Method) -> None:
    x, y = ntkfl.data.load("digits").rows.take(torch.arange(1442))
    cuts = {"a": slice(0, 150), "b": slice(150, 350), "c": slice(350, 700)}
    fed = ntkfl.data.from_clients({name: (x[cut], y[cut]) for name, cut in cuts.items()}, test=(x[700:], y[700:]))
    noise = {"noise_clients": 2} if method.name == "private-sums" else {}
    before, after = told(fed, method, Privacy(secure_sum=True, sum_samples=200, **noise))
    assert before == ["warning: 1 client has more records than sum_samples (200) and counts for less"]
    assert after == []


def test_a_client_that_cannot_comply_leaves_the_round(digits: ntkfl.data.Federated) -> None:
    """Numbers that are not finite are told from others by the client alone."""
    method, privacy = FedAvg(local_steps=2), Privacy(secure_sum=True)
    simulation = Simulation(ntkfl.models.mlp(64, 16, 10), digits, method, clients_per_round=4, privacy=privacy)
    simulation.clients.respond = lying({0, 3, 7}, scaled(math.nan))
    for record in simulation.run(4, callbacks=[]).history:
        assert record["summed_clients"] == 4 - len({0, 3, 7} & {*record["clients"]})


def test_seeds_are_not_kept(digits: ntkfl.data.Federated, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a round nothing of a seed is in the shuffler's tables."""
    kept: list[BatchStore] = []
    make = BatchStore.__init__

    def remember(self: BatchStore, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        kept.append(self)

    monkeypatch.setattr(BatchStore, "__init__", remember)
    trained(digits, FedAvg(local_steps=1), rounds=1)
    tables = [name for shuffler in kept for (name,) in shuffler._db.execute("SELECT name FROM sqlite_master")]
    assert "facts" in tables
    assert not {"senders", "pending", "released"} & {*tables}


def test_an_extreme_update_weighs_as_much_as_its_limit(
    digits: ntkfl.data.Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that runs this code, and lies about its data or update alone, shifts each mean by limit / k at most."""
    before = torch.cat([p.detach().flatten() for p in ntkfl.models.mlp(64, 16, 10).double().parameters()])
    monkeypatch.setattr("ntkfl.methods.replies.SUM_LIMIT", 2.0)
    method, attack = FedAvg(local_steps=1), Byzantine(kind="sign-flip", fraction=0.3, scale=1e30)
    run = trained(digits, method, rounds=1, byzantine=attack, seed=1)
    (record,) = run.history
    liars = len(record["byzantine"])
    assert record["bounded_clients"] == liars > 0
    assert any("scaled numbers down to the limit of a secure sum" in line for line in remarks(record))
    assert 1.0 < float((weights(run) - before).abs().max()) * 4 / liars <= 2.0 + 1.0  # the honest move by less than 1
    assert bool(weights(run).isfinite().all())
