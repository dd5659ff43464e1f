"""Measuring a model where the data and ρ are: holders of data return counts, the aggregator adds them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.methods import Task
from ntkfl.wire import Message


@dataclass(frozen=True)
class Score:
    """Over all samples counted; no accuracy for real-valued targets."""

    accuracy: float | None
    loss: float
    samples: int


def question(round: int, weights: Tensor) -> Message:
    """How well do these weights do?"""
    return Message("evaluate", round, {"weights": weights})


def count(task: Task, message: Message, x: Tensor, y: Tensor) -> Message:
    """The answer: samples, how many of them the model gets right (−1 for real-valued targets), and their loss sum."""
    weights = message.of_kind("evaluate").take("weights", tuple(task.like.shape), task.like)
    outputs = task.predict(weights, x)
    correct = -1 if y.is_floating_point() else int((outputs.argmax(1) == y).sum())
    loss = task.losses(outputs, y).double().sum().nan_to_num(nan=1e300, posinf=1e300)
    arrays = {"correct": torch.tensor([correct]), "samples": torch.tensor([len(y)]), "loss": loss.reshape(1)}
    return Message("counts", message.round, arrays)


def add_up(answers: Sequence[Message]) -> Score:
    """All counts together; `MessageError` where one makes no sense."""
    correct, samples, loss = 0, 0, 0.0
    real = False
    for answer in answers:
        n = int(answer.of_kind("counts").take("samples", (1,)))
        right, lost = int(answer.take("correct", (1,))), float(answer.take("loss", (1,)))
        if n < 1 or not -1 <= right <= n or lost < 0:
            raise MessageError("counts that make no sense")
        correct, samples, loss, real = correct + right, samples + n, loss + lost, real or right < 0
    if not samples:
        raise MessageError("nobody counted anything")
    return Score(None if real else correct / samples, loss / samples, samples)
