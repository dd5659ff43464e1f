"""Noise on a client's samples: everything a client of NTK-FL sends is made from a noisy copy of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field, model_validator

from ntkfl.methods.base import ClientRound, Method, Task
from ntkfl.methods.inspection import Participation
from ntkfl.privacy.accounting import Guarantee, record_guarantees
from ntkfl.privacy.noise import flip_labels, noisy_rows


class NoisySamples(Method):
    """`clip` and `noise` are of a sample's input, `label_flip` of its label."""

    noises: ClassVar[bool] = True

    label_flip: float = Field(
        0.0, ge=0, le=1, description="chance that a label is drawn anew from all classes; by default 0.2 with noise"
    )

    @model_validator(mode="before")
    @classmethod
    def _flip_by_default(cls, values: dict[str, Any]) -> dict[str, Any]:
        """An input hidden beside a label that is not would be no guarantee for the record."""
        return {"label_flip": 0.2} | values if values.get("noise") else values

    @property
    def adds_noise(self) -> bool:
        return self.noise > 0 or self.label_flip > 0

    def private(self, task: Task, client: ClientRound) -> ClientRound:
        """With its noisy copy in place of its samples: the same one at every exchange of a round."""
        if self.clip is None and not self.label_flip:
            return client
        own = client.randomness
        x = client.x if self.clip is None else noisy_rows(client.x, self.clip, self.noise, own)
        return replace(client, x=x, y=flip_labels(client.y, task.outputs, self.label_flip, own))

    @property
    def counts_on_draws(self) -> bool:
        """No credit for the cohort, which the aggregator knows."""
        return False

    def guarantees(self, run: Participation) -> list[Guarantee]:
        """Of a record: one row by itself, and among a round's rows where they are shuffled."""
        return record_guarantees(
            self.noise, self.label_flip, run.outputs, times=run.times, rate=self.subsample_rate, rows=run.rows,
            shuffle=self.shuffle, simulated=run.simulated,
        )  # fmt: skip
