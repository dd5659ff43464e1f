"""What a client's `reply` takes, keeps, repeats and refuses."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from flwr.app import Message
from ntkfl_experiments.rivals.qsgd import QSGD
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ntkfl.errors import TooFew
from ntkfl.flower.messages import payload_of
from ntkfl.methods import NTKFL, FedAvg, Privacy, Scaffold, SumNTKFL, SumRidge
from ntkfl.models import head
from tests.flower.cases import (
    convolution,
    difference,
    grid_of,
    in_process,
    perceptron,
    run,
    samples,
    train,
    weights,
)


class Pairs(Dataset[Any]):
    """A dataset of a user's own, in which items are what `item` makes of a pair."""

    def __init__(self, data: tuple[Tensor, Tensor], item: Callable[[Tensor, int], Any] = lambda x, y: (x, y)) -> None:
        self.data, self.item = data, item

    def __len__(self) -> int:
        return len(self.data[1])

    def __getitem__(self, at: int) -> Any:
        return self.item(self.data[0][at], int(self.data[1][at]))


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (lambda data: DataLoader(Pairs(data), batch_size=7), None),
        (lambda data: DataLoader(Pairs(data, _dictionary), batch_size=7), lambda b: (b["image"], b["label"])),
        (lambda data: tuple(part.numpy() for part in data), None),
    ],
    ids=["loader", "dictionaries", "numpy"],
)
def test_data_may_come_as_torch_users_have_them(make: Callable[..., Any], batch: Callable[..., Any] | None) -> None:
    clients = samples()
    result = run(grid_of(perceptron, [make(data) for data in clients], batch=batch), FedAvg(), perceptron, 2)
    assert difference(weights(result), in_process(FedAvg(), perceptron, clients, 2)) < 1e-9


def _dictionary(x: Tensor, y: int) -> dict[str, Any]:
    return {"image": x, "label": y}


def test_regression_tokens_and_a_loss_of_the_users_own_train_as_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = [(x, x[:, :2] - x[:, 2:4]) for x, _ in samples()]
    result = run(grid_of(regressor, clients), SumNTKFL(loss="mse"), regressor)
    assert difference(weights(result), in_process(SumNTKFL(loss="mse"), regressor, clients)) < 1e-9

    module = ModuleType("losses_of_a_user")
    module.weighted = lambda f, y: 3 * (f - y).square().mean(1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "losses_of_a_user", module)
    method = FedAvg(loss="losses_of_a_user:weighted", lr=0.01)
    result = run(grid_of(regressor, clients), method, regressor)
    assert difference(weights(result), in_process(method, regressor, clients)) < 1e-9

    words = [(torch.arange(60).view(20, 3) % 11 + i, torch.arange(20) % 3) for i in range(4)]
    result = run(grid_of(reader, words), FedAvg(), reader, 2)
    assert difference(weights(result), in_process(FedAvg(), reader, words, 2, tokens=True)) < 1e-9


def regressor() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def reader() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(16, 4), nn.Flatten(), nn.Linear(12, 3)).double()


def backbone(trained: bool) -> nn.Module:
    """A head on a frozen network, whose weights are the server's or others."""
    torch.manual_seed(11 if trained else 12)
    front = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh()).double()
    torch.manual_seed(13)
    return head(front, 3, features=16).double()


def half_frozen(trained: bool) -> nn.Module:
    net = perceptron()
    torch.manual_seed(11 if trained else 12)
    nn.init.normal_(net[0].weight)
    net[0].requires_grad_(False)
    return net


@pytest.mark.parametrize("make", [backbone, half_frozen])
@pytest.mark.parametrize("method", [SumRidge(), FedAvg()], ids=lambda m: m.name)
def test_what_does_not_train_is_the_same_at_every_client_and_never_sent(
    method: Any, make: Callable[[bool], nn.Module], said: list[str]
) -> None:
    """A client whose frozen weights differ is refused: it must load the server's."""
    clients = samples()
    result = run(grid_of(lambda: make(True), clients), method, lambda: make(True), 2)
    assert difference(weights(result), in_process(method, lambda: make(True), clients, 2)) < 1e-9
    grid = grid_of(lambda: make(True), clients)
    grid.apps[20] = train(lambda: make(False), clients[1])
    assert run(grid, method, lambda: make(True), 1).train_metrics_clientapp[1]["failures"] == 1
    assert any(re.match("node 20: .*ModelError.*load the same ones at both ends", line) for line in said)


# A question that comes again.


def answers(grid: Any, node: int = 10) -> list[bytes]:
    """What a node answers to all questions of a run, asked in their order once more by the same server."""
    asked = [m for m in grid.asked if m.metadata.dst_node_id == node and "ntkfl" in m.content]
    return [payload_of(grid.reply(message)) for message in asked]


@pytest.mark.parametrize(
    ("method", "make", "shape", "how"),
    [
        (QSGD(batch_size=4), perceptron, (6,), {}),
        (SumNTKFL(), convolution, (1, 6, 6), {}),
        (Scaffold(batch_size=4), perceptron, (6,), {}),
        (NTKFL(), perceptron, (6,), {"privacy": Privacy(subsample_rate=0.5)}),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_repeated_question_gets_the_same_answer_and_nobody_else_can_tell_it(
    method: Any, make: Callable[[], nn.Module], shape: tuple[int, ...], how: dict[str, Any]
) -> None:
    clients = samples(shape=shape)
    loaders = [DataLoader(Pairs(data), batch_size=5, shuffle=True) for data in clients]
    grid = grid_of(make, loaders, seed=None)
    run(grid, method, make, 2, **how)
    first = [payload_of(m) for m in grid.heard if m.metadata.src_node_id == 10 and "ntkfl" in m.content]
    asked = [m for m in grid.asked if m.metadata.dst_node_id == 10 and "ntkfl" in m.content]
    assert len(first) == len(asked) >= 2
    # The last round, whole, as a server asks it that has gone on from its checkpoint.
    torch.manual_seed(99)
    again = [payload_of(grid.reply(message)) for message in asked[len(asked) // 2 :]]
    assert again == first[len(asked) // 2 :]
    if method.name in (QSGD.name, "scaffold"):  # without this client's key the draws are others
        grid.contexts[10].state["ntkfl"]["key"] = bytes(32)
        del grid.contexts[10].state["ntkfl.site"]  # which would refuse to answer in another way
        assert payload_of(grid.reply(asked[-1])) != first[-1]


# Refusals.


def network(width: int, outputs: int, *between: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, width), *(between or (nn.Tanh(),)), nn.Linear(width, outputs))


X = torch.randn(9, 6)


@pytest.mark.parametrize(
    ("make", "data", "why"),
    [
        (perceptron, (X[:, :5], torch.arange(9) % 3), r"DataError.*inputs of shape \[5\]; the run's terms say \[6\]"),
        (perceptron, (X, torch.arange(9)), "DataError.*labels 0 to 8; the run's terms say 3 classes"),
        (perceptron, (X, torch.randn(9, 4)), r"DataError.*targets of shape \[9, 4\]; the run's terms say 3 outputs"),
        (perceptron, (X * float("nan"), torch.arange(9) % 3), "DataError.*this client's data: x has a value that"),
        (perceptron, Pairs(samples()[0], _dictionary), "DataError.*this client's data: batch 0 is a dict"),
        (network(9, 3), samples()[3], "ModelError.*the model is not the server's"),
        (network(8, 4), samples()[3], "ModelError.*the model is not the server's"),
        (network(8, 3, nn.Flatten(0)), samples()[3], "ModelError.*the model must give a tensor with one row"),
    ],
)
def test_data_and_networks_that_do_not_fit_are_refused_by_their_client_and_the_round_goes_on(
    make: Callable[[], nn.Module], data: Any, why: str, said: list[str]
) -> None:
    grid = grid_of(perceptron, samples())
    grid.apps[40] = train(make, data)
    result = run(grid, FedAvg(), perceptron, 1)
    assert result.train_metrics_clientapp[1]["failures"] == 1
    assert any(re.match(f"node 40: .*{why}", line) for line in said), said


def test_the_server_cannot_make_a_client_import_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that the server's app has, and the client's has not."""
    (tmp_path / "planted_code.py").write_text("def loss(f, y):\n    return (f - y).square().mean(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    grid = grid_of(perceptron, samples())
    push = grid.push_messages

    def elsewhere(messages: Any) -> Any:
        """Clients are processes of their own: what the server has imported, they have not."""
        kept = sys.modules.pop("planted_code", None)
        keys = list(push(messages))
        assert "planted_code" not in sys.modules
        if kept is not None:
            sys.modules["planted_code"] = kept
        return keys

    grid.push_messages = elsewhere  # type: ignore[method-assign]
    with pytest.raises(TooFew, match=r"no round changed the model; .*the terms name code of this site's"):
        run(grid, FedAvg(loss="planted_code:loss"), perceptron, 1)
    assert "planted_code" in sys.modules
    sys.modules.pop("planted_code")


def test_a_sites_policy_decides_before_anything_is_computed(tmp_path: Path, said: list[str]) -> None:
    """And what it lets through is in its ledger; asked again, the bytes are those that were kept."""
    (tmp_path / "policy.toml").write_text('methods = ["sums"]\n')
    clients = samples()
    grid = grid_of(perceptron, clients)
    read: list[int] = []

    class Watched(Pairs):
        def __len__(self) -> int:
            read.append(1)
            return super().__len__()

    grid.apps[40] = train(perceptron, Watched(clients[3]), policy=tmp_path / "policy.toml")
    result = run(grid, FedAvg(), perceptron, 1, min_available_nodes=4)
    assert result.train_metrics_clientapp[1]["failures"] == 1
    assert any("fedavg sends updates, and the policy allows sums" in line for line in said)
    grid.asked.clear()
    result = run(grid, SumNTKFL(), perceptron, 1)
    assert result.train_metrics_clientapp[1]["failures"] == 0
    read.clear()
    assert len(answers(grid, 40)) == 1
    assert not read


def test_under_a_policy_an_error_says_nothing_of_the_data(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "policy.toml").write_text('methods = ["updates"]\n')
    grid = grid_of(perceptron, samples())
    secret = torch.randn(9, 6), torch.arange(9) + 70  # labels that the network has no outputs for
    grid.apps[40] = train(perceptron, secret, policy=tmp_path / "policy.toml")
    run(grid, FedAvg(), perceptron, 1)
    (line,) = [line for line in said if line.startswith("node 40")]
    assert line.endswith("<'failed with DataError: see the log of this site'>")


def test_a_message_of_another_strategy_is_no_question() -> None:
    from flwr.app import ArrayRecord, RecordDict

    grid = grid_of(perceptron, samples())
    message = Message(RecordDict({"arrays": ArrayRecord()}), dst_node_id=10, message_type="train")
    with pytest.raises(Exception, match="not an ntkfl message: do both ends use"):
        grid.apps[10](message, grid.contexts[10])
