"""The sparse form against a dense Jacobian whose other entries are zero."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import ntkfl
from ntkfl.errors import ModelError
from ntkfl.tangent import sparse
from ntkfl.tangent.blocks import DenseBlock
from ntkfl.tangent.jacobian import Jacobian
from ntkfl.tangent.sparse import SparseBlock
from tests.tangent.networks import build

EXACT = 1e-12


def case(N: int, d2: int, d: int, k: int, seed: int = 0) -> tuple[Jacobian, Tensor]:
    """A sparse Jacobian with k entries a sample at random places, and the same as a plain tensor [N, d2, d]."""
    g = torch.Generator().manual_seed(seed)
    places = torch.stack([torch.randperm(d2 * d, generator=g)[:k].sort().values for _ in range(N)] or [torch.empty(0)])
    places = places.long().view(N, k)
    values = torch.randn(N, k, generator=g, dtype=torch.float64)
    dense = torch.zeros(N, d2 * d, dtype=torch.float64)
    for i in range(N):
        dense[i, places[i]] = values[i]
    return Jacobian([SparseBlock(values, places, d2, d)], d2, d), dense.view(N, d2, d)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 12), st.data())
@example(7, 3, 11, None)
def test_equals_the_dense_jacobian_of_the_same_entries(N: int, d2: int, d: int, data: st.DataObject | None) -> None:
    k = d2 * d if data is None else data.draw(st.integers(1, d2 * d))
    J, D = case(N, d2, d, k)
    assert J.shape == (N, d2, d)
    assert torch.equal(J.dense(), D)
    assert (J.kernel() - torch.einsum("ajd,bjd->ab", D, D) / d2).abs().max() < EXACT
    delta, R = torch.randn(2, 3, d, dtype=torch.float64), torch.randn(2, 3, N, d2, dtype=torch.float64)
    assert (J.jvp(delta) - torch.einsum("njd,abd->abnj", D, delta)).abs().max() < EXACT
    assert (J.vjp(R) - torch.einsum("njd,abnj->abd", D, R)).abs().max() < EXACT
    assert (J.jvp(delta[0, 0]) - J.jvp(delta)[0, 0]).abs().max() < EXACT
    assert (J.vjp(R[0, 0]) - J.vjp(R)[0, 0]).abs().max() < EXACT
    assert J.jvp(delta[:0]).shape == (0, 3, N, d2)
    assert J.vjp(R[:0]).shape == (0, 3, d)


def test_gram_in_several_pieces_and_against_other_rows() -> None:
    J, D = case(70, 3, 40, 17)
    K, E = case(75, 3, 40, 17, seed=1)
    assert (J.gram(K) - torch.einsum("ajd,bjd->ab", D, E) / 3).abs().max() < EXACT
    H = J.kernel()
    assert torch.equal(H, H.T)


def test_gram_holds_one_spread_row_where_rows_are_long() -> None:
    d = 3_000_000
    positions = torch.tensor([[0, 5, 3 * d - 1], [5, d, 3 * d - 1]])
    J = Jacobian([SparseBlock(torch.tensor([[1.0, 2, 3], [5, 7, 11]]), positions, 3, d)], 3, d)
    assert torch.equal(3 * J.kernel(), torch.tensor([[14.0, 43], [43, 195]]))


def test_against_other_forms() -> None:
    J, D = case(6, 3, 10, 7)
    other = Jacobian([DenseBlock(D, (slice(0, 10),))], 3, 10)
    other_k, E = case(4, 3, 10, 9, seed=1)
    assert (J.gram(other) - J.kernel()).abs().max() < EXACT
    mixed = ntkfl.concatenate([J, other, other_k])
    whole = torch.cat([D, D, E])
    R = torch.randn(16, 3, dtype=torch.float64)
    assert (mixed.vjp(R) - torch.einsum("njd,nj->d", whole, R)).abs().max() < EXACT
    assert (mixed.kernel() - torch.einsum("ajd,bjd->ab", whole, whole) / 3).abs().max() < EXACT


def test_rows_and_concatenation() -> None:
    J, D = case(9, 3, 10, 7)
    for index in (slice(2, 5), [4, -1, 4], torch.tensor([True, False, True] * 3), 3):
        part, expected = J[index], D[index].view(-1, 3, 10)
        assert torch.equal(part.dense(), expected)
        delta, R = torch.randn(10, dtype=torch.float64), torch.randn(len(part), 3, dtype=torch.float64)
        assert (part.jvp(delta) - expected @ delta).abs().max() < EXACT
        assert (part.vjp(R) - torch.einsum("njd,nj->d", expected, R)).abs().max() < EXACT
    K, E = case(4, 3, 10, 7, seed=1)
    both = ntkfl.concatenate([J[::2], K])
    assert torch.equal(both.dense(), torch.cat([D[::2], E]))


def test_no_rows() -> None:
    J, _ = case(3, 2, 5, 4)
    none = J[:0]
    assert none.shape == (0, 2, 5)
    assert torch.equal(none.vjp(torch.zeros(0, 2)), torch.zeros(5, dtype=torch.float64))
    assert none.jvp(torch.zeros(5)).shape == (0, 2)
    assert none.kernel().shape == (0, 0)


@pytest.mark.parametrize(("kernel", "scheme"), [("full", "flow"), ("trace", "flow"), ("trace", "paper")])
def test_evolution_equals_that_of_the_dense_jacobian(kernel: str, scheme: str) -> None:
    model, x = build("relu")
    D = ntkfl.jacobian(model, x).dense()
    edge = D.flatten(1).abs().kthvalue(D[0].numel() - 30, dim=1).values.view(-1, 1, 1)
    D = torch.where(D.abs() > edge, D, 0.0)
    d2, d = D.shape[1:]
    places = D.flatten(1).nonzero()[:, 1].view(len(x), 30)
    J = Jacobian([SparseBlock(D.flatten(1).gather(1, places), places, d2, d)], d2, d)
    dense = Jacobian([DenseBlock(D, (slice(0, d),))], d2, d)
    f0, y = model(x).detach(), torch.tensor([0, 1, 2, 2, 1, 0, 1])
    ours, truth = (ntkfl.evolve(A, f0, y, lr=0.5, steps=[3, 20], kernel=kernel, scheme=scheme) for A in (J, dense))
    assert (ours.deltas() - truth.deltas()).abs().max() < 1e-10
    assert truth.deltas().abs().max() > 0.1


class TestMatrices:
    def test_wide_indices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What d2·d or N·k of 2^31 and more would take."""
        assert SparseBlock(torch.ones(1, 1), torch.tensor([[2**31]]), 1, 2**31 + 1).positions.dtype == torch.int64
        narrow, _ = case(6, 3, 10, 7)
        monkeypatch.setattr(sparse, "index_type", lambda size: torch.int64)
        J, _ = case(6, 3, 10, 7)
        assert narrow.tensors()[0].dtype == torch.int32
        assert J.tensors()[0].dtype == torch.int64
        R = torch.randn(6, 3, dtype=torch.float64)
        assert (J.jvp(J.vjp(R)) - narrow.jvp(narrow.vjp(R))).abs().max() < EXACT
        assert (J.kernel() - narrow.kernel()).abs().max() < EXACT


@pytest.mark.parametrize(
    ("positions", "reason"),
    [
        ([[0, 2, 2], [0, 1, 2]], "increase strictly"),
        ([[0, 1, 2], [2, 1, 3]], "increase strictly"),
        ([[-1, 1, 2], [0, 1, 2]], "increase strictly"),
        ([[0, 1, 6], [0, 1, 2]], "below 6"),
        ([[0, 1], [0, 1]], r"must both be \[N, k\]"),
        ([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]], "int32 or int64"),
    ],
)
def test_positions_out_of_place_are_refused(positions: list[list[float]], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        SparseBlock(torch.ones(2, 3), torch.tensor(positions), 2, 3)
