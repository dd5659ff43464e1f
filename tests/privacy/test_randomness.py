"""A client's randomness: keyed by all of its 32 bytes, out of reach of a search over seeds, and of the right law."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from ntkfl.errors import ConfigError
from ntkfl.federation.client import seeded
from ntkfl.methods import ClientRound
from ntkfl.privacy.randomness import Purpose, Randomness, discrete_gaussians

PURPOSES: tuple[Purpose, ...] = ("noise", "batches", "quantisation", "dropout", "labels")
N = 1 << 17
GRAINS = 2.0**10  # integers per unit


@pytest.mark.parametrize("bit", [32, 64, 191, 255])
def test_keys_that_differ_in_one_high_bit_draw_other_noise(bit: int) -> None:
    """The generator of torch keeps 32 bits of its seed: seeds 1 and 1 + 2^32 gave equal noise and batches."""
    keys = [Randomness((1 | high).to_bytes(32, "little")) for high in (0, 1 << bit)]
    assert not np.array_equal(*(discrete_gaussians(24.0 * GRAINS, 100, own) for own in keys))
    assert not np.array_equal(*(own.orders("batches", 2, 40) for own in keys))


@pytest.mark.parametrize("own", [Randomness.fresh(), seeded(1, 0)(1)[0]], ids=["fresh", "seeded"])
def test_a_search_over_seeds_finds_no_noise(own: Randomness) -> None:
    """The attack, for a client whose seed lies in the searched range: noise by torch's generator is found at once."""
    client = ClientRound(0, torch.randn(20, 6), torch.arange(20) % 3, own)
    rows = client.x / client.x.norm(dim=1, keepdim=True)
    drawn = discrete_gaussians(24.0 * GRAINS, rows.numel(), client.randomness) / GRAINS
    seen = rows + torch.from_numpy(drawn).float().view(rows.shape)

    def found(observed: torch.Tensor) -> list[int]:
        """Seeds whose noise leaves rows of norm at most the clip, as the true one does."""
        drawn = (torch.randn(20, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(2000))
        left = (observed - 24.0 * noise for noise in drawn)
        return [seed for seed, rows in enumerate(left) if float(rows.norm(dim=1).max()) <= 1.01]

    weak = rows + 24.0 * torch.randn(20, 6, generator=torch.Generator().manual_seed(1234))
    assert found(weak) == [1234]
    assert found(seen) == []


def test_streams_are_independent() -> None:
    """One word each of many streams are all different; the noise says nothing of the labels."""
    own = Randomness.simulated(0)
    words = {purpose: own.words(purpose, 1000) for purpose in PURPOSES}
    assert len({word for stream in words.values() for word in stream.tolist()}) == 1000 * len(PURPOSES)
    for purpose in PURPOSES[1:]:
        u, v = (own.uniforms(p, N) for p in (PURPOSES[0], purpose))
        assert abs(np.corrcoef(u, v)[0, 1]) < 6 / N**0.5
    fresh = Randomness(bytes(32))
    others = [Randomness.simulated(0, 1), Randomness.simulated(1), fresh.for_question(b""), fresh.for_question(b"a")]
    assert len({r.seed("noise") for r in (own, fresh, *others)}) == 6
    assert fresh.for_question(b"a").seed("noise") == others[-1].seed("noise")
    assert own.for_question(b"a") is own


def test_a_stream_begins_the_same_however_much_of_it_is_drawn() -> None:
    own = Randomness.simulated(7)
    long = own.words("noise", (1 << 17) + 5)
    for count in (0, 1, 1 << 16, (1 << 16) + 1):
        assert np.array_equal(own.words("noise", count), long[:count])


def test_orders_are_permutations_and_uniform() -> None:
    orders = Randomness.simulated(3).orders("batches", 24_000, 4)
    assert np.array_equal(np.sort(orders, axis=1), np.broadcast_to(np.arange(4), orders.shape))
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-9


def test_the_key_does_not_show_and_is_never_written() -> None:
    own = Randomness(bytes(range(32)))
    client = ClientRound(0, torch.zeros(1, 1), torch.zeros(1), own)
    assert "000102" not in repr(client) + str(own) + repr(own)
    assert "\\x01" not in repr(client)
    for write in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="not to be pickled"):
            write(own)
    with pytest.raises(ConfigError, match="32 bytes"):
        Randomness(bytes(8))
    assert Randomness.fresh().seed("noise") != Randomness.fresh().seed("noise")
    draws = seeded(0, 1)
    assert draws(2)[0].seed("noise") == draws(2)[0].seed("noise") != draws(3)[0].seed("noise")


# Discrete Gaussian draws against their probabilities


def probabilities(sigma: float, most: int) -> dict[int, float]:
    weights = {k: math.exp(-0.5 * (k / sigma) ** 2) for k in range(-40 * most, 40 * most + 1)}
    total = math.fsum(weights.values())
    return {k: weights[k] / total for k in range(-most, most + 1)}


@pytest.mark.parametrize("sigma", [0.5, 1.3, 4.0])
def test_counts_are_those_of_the_distribution(sigma: float) -> None:
    count, most = 200_000, math.ceil(2 * sigma)
    draws = discrete_gaussians(sigma, count, Randomness(bytes(32)))
    for k, p in probabilities(sigma, most).items():
        assert abs(int((draws == k).sum()) - count * p) < 5 * math.sqrt(count * p) + 1


@pytest.mark.parametrize("sigma", [50.0, 13_500.0, 2.0**18 + 0.3])
def test_moments_of_wide_noise(sigma: float) -> None:
    count = 100_000
    draws = discrete_gaussians(sigma, count, Randomness(bytes(range(32)))) / sigma
    assert abs(float(draws.mean())) < 5 / math.sqrt(count)
    assert abs(float((draws**2).mean()) - 1) < 5 * math.sqrt(2 / count)
    assert abs(float((draws**4).mean()) - 3) < 5 * math.sqrt(96 / count)


class Chosen(Randomness):
    """A stream that gives the words it was told to."""

    def __init__(self, words: list[int], more: list[int]) -> None:
        super().__init__(bytes(32))
        self.parts = {0: words, 1: more}

    def words(self, purpose: object, count: int, part: int = 0) -> np.ndarray:  # type: ignore[override, type-arg]
        return np.array(self.parts[part][:count], dtype=np.uint64)


def test_the_ends_of_the_stream_are_sizes_too() -> None:
    """The last places of all draw again: sizes are within 9.5 σ, and the sign is the first bit."""
    last, sign = 2**63 - 1, 2**63
    draws = discrete_gaussians(3.0, 4, Chosen([0, sign, last, sign | last], [0, last]))
    assert draws[0] == draws[1] == 0
    assert 0 <= draws[2] <= 29
    assert -29 <= draws[3] <= 0
    middle = discrete_gaussians(3.0, 2, Chosen([1 << 62, sign | (1 << 62)], []))
    assert middle[0] == -middle[1] == 2  # half of all |x| are at most 2, as 0.6745 σ = 2.02


def test_places_add_up_to_the_distribution() -> None:
    """Whole places and what is left over of them, by bisection on the word: P(|x| ≤ k) to 2^-50."""
    sigma = 3.0
    p = probabilities(sigma, 3)
    low, high = 0, 2**63 - 1
    while high - low > 1:  # the first word whose size is above 0
        middle = (low + high) // 2
        low, high = (middle, high) if discrete_gaussians(sigma, 1, Chosen([middle], [0]))[0] == 0 else (low, middle)
    assert abs(high / 2**63 - p[0]) < 2.0**-50
