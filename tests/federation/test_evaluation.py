"""Scores: what holders of data say, bounded so that nobody's word weighs more than it should."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ntkfl.errors import MessageError
from ntkfl.federation.evaluation import (
    MOST_LOSS,
    OwnTestSet,
    Score,
    add_up,
    counts,
    question,
    rounded,
    score_rows,
)
from ntkfl.federation.server_state import ServerState
from ntkfl.methods import FedAvg, Task
from ntkfl.wire import Message


def setting() -> tuple[Task, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Task(nn.Linear(4, 3).double(), 3, "ce"), torch.randn(50, 4).double(), torch.randint(0, 3, (50,))


def test_rows_and_counts_say_the_same() -> None:
    task, x, y = setting()
    asked = question(2, task.like)
    f = task.predict(task.like, x)
    truth = Score(float((f.argmax(1) == y).double().mean()), float(nn.functional.cross_entropy(f, y)), 50)
    for answers in (score_rows(task, asked, x, y), [counts(task, asked, x, y)]):
        score = add_up(answers, real_targets=False)
        assert score.accuracy == truth.accuracy
        assert score.loss == pytest.approx(truth.loss)
        assert score.samples == 50
    rows = score_rows(task, asked, x, y)
    assert len({len(row.encode()) for row in rows}) == 1
    assert add_up(rows, False, most=1).samples == 50


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("average", [0.5, 0.0])
def test_the_average_and_the_last_model_are_each_measured_with_their_own_statistics(average: float, real: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    x, y = torch.randn(50, 4).double(), torch.randn(50, 3).double() if real else torch.randint(0, 3, (50,))
    state = ServerState(Task(model, 3, "mse" if real else "ce"), FedAvg(average=average))
    state.average.settled = state.average.settled + torch.rand(len(state.flat_weights())).double()

    def by_hand(flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[float | None, float]:
        W, b, scale, shift, mean, var = torch.split(flat, [12, 3, 3, 3, 3, 3])
        f = (x @ W.view(3, 4).T + b - mean) / (var + 1e-5).sqrt() * scale + shift
        if real:
            return None, float(0.5 * nn.functional.mse_loss(f, y))
        return float((f.argmax(1) == y).double().mean()), float(nn.functional.cross_entropy(f, y))

    score, more = OwnTestSet((x, y), (x[:20], y[:20])).measure(state, 1, [0])
    accuracy, loss = by_hand(state.average.value, x, y)
    assert (score.accuracy, score.loss, score.samples) == (accuracy, pytest.approx(loss), 50)
    assert more["last_accuracy"] == (by_hand(state.flat_weights(), x, y)[0] if average else accuracy)
    assert real or not average or more["last_accuracy"] != accuracy
    held = by_hand(state.average.value, x[:20], y[:20])
    assert (more["validation_accuracy"], more["validation_loss"]) == (held[0], pytest.approx(held[1]))


def test_a_model_that_overflows_has_a_large_loss_not_none() -> None:
    task, x, y = setting()
    score = add_up([counts(task, question(1, task.like * 1e200), x, y)], False)
    assert score.loss is not None
    assert 1 < score.loss <= MOST_LOSS


def said(correct: int, samples: int, loss: float) -> Message:
    arrays = {"correct": torch.tensor([correct]), "samples": torch.tensor([samples]), "loss": torch.tensor([loss])}
    return Message("counts", 1, arrays)


@pytest.mark.parametrize(
    "lie",
    [said(2**62, 2**62, 0.0), said(6, 5, 1.0), said(-1, 5, 1.0), said(-2, 5, 1.0), said(1, 0, 0.0), said(1, 2, -1.0),
     said(1, 1, 1e300), said(1, 1, float("inf")), Message("losses", 1, {}), Message("counts", 1, {})],
)  # fmt: skip
def test_lies_that_make_no_sense_are_refused(lie: Message) -> None:
    with pytest.raises(MessageError):
        add_up([lie], real_targets=False)


def test_a_row_is_one_vote() -> None:
    with pytest.raises(MessageError):
        add_up([said(5, 5, 1.0)], real_targets=False, most=1)
    assert add_up([], real_targets=False) == Score(None, None, 0)


@pytest.mark.parametrize(
    ("exact", "near"),
    [((7, 14, 3.2), (10, 10, 0.0)), ((4, 16, 26.0), (0, 20, 30.0)), ((0, 2, 1.0), (0, 10, 0.0)),
     ((-1, 9, 6.0), (-1, 10, 10.0))],
)  # fmt: skip
def test_counts_are_rounded_as_the_contract_says(exact: tuple[int, int, float], near: tuple[int, int, float]) -> None:
    answer = rounded(said(*exact), 10)
    assert (int(answer.arrays["correct"]), int(answer.arrays["samples"]), float(answer.arrays["loss"])) == near
    add_up([answer], real_targets=exact[0] == -1)
