"""What the aggregator and the shuffler see does not depend on who sent what, only on the sum: a test with power.

Two worlds of clients with equal sums are played many times. Everything that a role sees, and what it can make of it by
adding and subtracting, is binned, and the bins of the two worlds are compared by a χ² test. With the masks off (for the
aggregator) or the seals off (for the shuffler), the same test tells the worlds apart with certainty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from ntkfl.crypto import masking
from ntkfl.crypto.hpke import SEAL_BYTES
from ntkfl.crypto.masking import Words
from ntkfl.crypto.row_frames import SEED_BYTES, Announced, unpack_rows
from tests.federation.masked import SAID, Round, played, words_of

NUMBERS, PLAYED, BINS = 48, 100, 32
CERTAIN = 1e-12  # a p-value that chance does not reach
View = Callable[[Round], Sequence[Words]]
SECRET = [(-1) ** i * 100_000_000 * (i % 3) for i in range(NUMBERS)]


def worlds() -> tuple[dict[str, Words], dict[str, Words]]:
    """Equal sums: one client with a secret, another with its negative, a third; and the same three with nothing."""
    third = words_of([0, *range(1, NUMBERS)])
    own, minus, nothing = words_of(SECRET), words_of([-value for value in SECRET]), words_of([0] * NUMBERS)
    return {"ada": own, "bob": minus, "cyd": third}, {"ada": nothing, "bob": third, "cyd": nothing}


def aggregator(own: Round) -> list[Words]:
    """Every opened vector and the masks' sum; each against each, and all against all."""
    seen = own.aggregator_view()
    differences = [one - two for one, two in combinations(seen, 2)]
    sums = [one + two for one, two in combinations(seen, 2)]
    return [*seen, *differences, *sums, sum(seen[:-1], np.zeros(NUMBERS, dtype=np.uint32)) - seen[-1]]


def shuffler(own: Round) -> list[Words]:
    """Every sealed vector, with its mask taken off too, and the seeds; each client's against another's."""
    seen: list[Words] = []
    for body in own.submitted:
        seed, (row,) = body[:SEED_BYTES], unpack_rows(body[SEED_BYTES:])[1]
        # Behind the key, before the tag.
        sealed = np.frombuffer(row[SEAL_BYTES - 16 : -16], dtype="<u4").astype(np.uint32)
        stream = masking.mask(seed, SAID, len(sealed))
        seen += [sealed, sealed - stream]
    seeds = [np.frombuffer(body[:SEED_BYTES], dtype="<u4").astype(np.uint32) for body in own.submitted]
    return [*seen, *(one - two for one, two in combinations(seen, 2)), *seeds]


def p_value(view: View) -> float:
    """That the two worlds look alike, at the place where they look least so, times the number of places: by the highest
    five bits of all numbers of a vector, and of some numbers, as a secret is another at each.
    """
    seen = [[view(played(world, limit=2e8)) for _ in range(PLAYED)] for world in worlds()]
    found = []
    for k in range(len(seen[0][0])):
        one, two = (np.stack([views[k] for views in world]) >> 27 for world in seen)  # [played, numbers]
        for a, b in ((one, two), *((one[:, n], two[:, n]) for n in (1, 2, 3))):
            bins = np.stack([np.bincount(some.reshape(-1), minlength=BINS) for some in (a, b)])
            bins = bins[:, bins.any(0)]
            found.append(float(chi2_contingency(bins).pvalue) if bins.shape[1] > 1 else 1.0)
    return min(found) * len(found)


@pytest.mark.parametrize("view", [aggregator, shuffler])
def test_neither_role_can_tell_clients_with_equal_sums_apart(view: View) -> None:
    assert p_value(view) > CERTAIN


def no_mask(seed: bytes, said: Announced, count: int) -> Words:
    return np.zeros(count, dtype=np.uint32)


def no_seal(rows: list[bytes], *_: object) -> list[bytes]:
    return [bytes(32) + row + bytes(16) for row in rows]


@pytest.mark.parametrize(
    ("view", "broken"),
    [
        (aggregator, {"secure_sum.mask": no_mask, "masking.mask": no_mask}),
        (aggregator, {"secure_sum.os.urandom": bytes}),  # one mask for all: vectors differ by what they hide
        (shuffler, {"secure_sum.seal_rows": no_seal}),
    ],
    ids=["no masks", "one mask", "no seals"],
)
def test_without_its_protection_each_can(
    view: View, broken: dict[str, Callable[..., object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, instead in broken.items():
        room = "crypto" if name.startswith("masking") else "federation"
        monkeypatch.setattr(f"ntkfl.{room}.{name}", instead)
    assert p_value(view) < CERTAIN
