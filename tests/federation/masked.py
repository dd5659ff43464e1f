"""A secure sum by hand: clients' integers through the shuffler's own code, and what each role sees of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ntkfl.crypto.hpke import SealingKey
from ntkfl.crypto.masking import Words, unpack_words
from ntkfl.crypto.row_frames import SEED_BYTES, Announced, BatchKey, open_row, unpack_rows
from ntkfl.federation.secure_sum import SumSchema, mask_reply, open_sum
from ntkfl.methods.replies import Addend
from ntkfl.services.announcement import Batch
from ntkfl.services.store import BatchStore

KEY = BatchKey(1, 0)
SAID = Announced.of(KEY, b"announced")
NAMES = ("federation", "run")


def schema_of(numbers: int, clients: int, limit: float = 1000.0) -> SumSchema:
    """Of one array of so many numbers."""
    return SumSchema.of({"vector": Addend(torch.zeros(numbers), limit)}, clients)


@dataclass
class Round:
    """One batch; `submit` is a client's side, `total` the aggregator's."""

    schema: SumSchema
    cohort: tuple[str, ...]
    min_clients: int = 2
    shuffler: BatchStore = field(default_factory=BatchStore)
    opener: SealingKey = field(default_factory=SealingKey.generate)

    def __post_init__(self) -> None:
        sizes = (1, self.schema.sealed_bytes, self.min_clients, self.schema.numbers)
        self.shuffler.open(Batch(KEY, len(self.cohort), *sizes), SAID.digest)
        self.submitted: list[bytes] = []  # what the shuffler sees

    def submit(self, client: str, words: Words) -> None:
        body = mask_reply(words, self.opener.public, *NAMES, SAID)
        self.submitted.append(body)
        self.shuffler.submit(client, SAID, unpack_rows(body[SEED_BYTES:])[1], body[:SEED_BYTES])

    def release(self) -> None:
        _, self.sealed, self.masks = self.shuffler.release(KEY)

    def total(self) -> tuple[dict[str, Tensor], int]:
        self.release()
        return open_sum(self.schema, self.sealed, self.masks, self.opener, *NAMES, SAID)

    def aggregator_view(self) -> list[Words]:
        """All that the aggregator can read: every masked vector, opened, and the sum of the masks."""
        self.release()
        rows = [open_row(self.opener, row, *NAMES, SAID) for row in self.sealed]
        return [unpack_words(data, self.schema.numbers) for data in (*rows, self.masks)]


def played(vectors: Mapping[str, Words], limit: float = 1000.0) -> Round:
    """A round in which everybody has submitted its integers."""
    numbers = len(next(iter(vectors.values())))
    own = Round(schema_of(numbers - 1, len(vectors), limit), tuple(vectors))
    for client, words in vectors.items():
        own.submit(client, words)
    return own


def words_of(values: list[int]) -> Words:
    return np.array([value % 2**32 for value in values], dtype=np.uint32)
